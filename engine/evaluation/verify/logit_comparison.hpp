// Compares a decoder's logits with those of ForcedDecoder.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "engine/evaluation/verify.hpp"
#include "engine/evaluation/verify/forced_decoder.hpp"

namespace kvlab {

class LogitComparison {
 public:
  /// `reference`: the decoder's model, which must outlive this object. `rounding`: the dtype that
  /// the decoder rounds to.
  LogitComparison(const Model& reference, const ResolvedConfig& cache,
                  std::optional<Dtype> rounding, unsigned threads);

  // Call begin(), layer() for each layer, and after the last append of a feed, compare().
  void begin(std::span<const std::int32_t> ids, std::uint32_t first);
  void layer(std::uint32_t layer, const ForcedDecoder::LiveSets& live, std::span<const float> k,
             std::span<const float> v);
  /// Compares logits of the last token: of the watched decoder, and of one without an observer.
  void compare(std::span<const float> watched, std::span<const float> alone);

  LogitCheck result() const;

 private:
  struct Squares {
    double size = 0;   ///< sum of the squares of the expected logits
    double found = 0;  ///< sum of the squared errors of the decoder
    double plain = 0;  ///< sum of the squared errors of a forward pass in the decoder's dtype
    double relative(double squares) const;
    LogitCheck check(std::uint64_t rows, std::optional<Dtype> rounding) const;
  };

  std::optional<Dtype> rounding_;
  ForcedDecoder exact_;
  std::optional<ForcedDecoder> plain_;
  std::uint64_t rows_ = 0;
  Squares watched_, alone_, keys_and_values_;
};

}  // namespace kvlab
