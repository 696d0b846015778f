// A decoder's logits against those of ForcedDecoder.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "engine/evaluation/verify.hpp"
#include "engine/evaluation/verify/forced_decoder.hpp"

namespace kvlab {

class LogitComparison {
 public:
  /// `reference`: the decoder's model, which must outlive it. `rounding`: what the decoder rounds
  /// to.
  LogitComparison(const Model& reference, const ResolvedConfig& cache,
                  std::optional<Dtype> rounding, unsigned threads);

  // Called in this order: begin, each layer, and after the last append of what was fed, compare.
  void begin(std::span<const std::int32_t> ids, std::uint32_t first);
  void layer(std::uint32_t layer, const ForcedDecoder::LiveSets& live, std::span<const float> k,
             std::span<const float> v);
  /// Of the last token: of the decoder that is watched, and of one that nothing watches.
  void compare(std::span<const float> watched, std::span<const float> alone);

  LogitCheck result() const;

 private:
  /// Sums of squares: of what was wanted, and of differences from it.
  struct Squares {
    double size = 0, found = 0, plain = 0;  // plain: of a forward pass in the decoder's dtype
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
