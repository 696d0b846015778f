// The model's forward pass on the CPU over the tokens and the live sets of another decoder, with
// whose logits `kvlab verify` compares it. Where tiers quantize, it attends over that decoder's
// keys and values: a difference in the last bit may move an element by a whole step of its format,
// and all that follows with it.
#pragma once

#include <deque>
#include <functional>
#include <optional>
#include <vector>

#include "engine/checkpoint/model.hpp"
#include "engine/evaluation/verify/float64_attention.hpp"

namespace kvlab {

class ForcedDecoder {
 public:
  /// `model` must outlive it. `rounding`: what goes into a matrix product, queries, keys, values
  /// and attention are rounded to that dtype, as a plain engine of that dtype would.
  ForcedDecoder(const Model& model, const ResolvedConfig& cache, std::optional<Dtype> rounding,
                unsigned threads);

  /// Tokens from position `first` on.
  void begin(std::span<const std::int32_t> ids, std::uint32_t first);
  using LiveSets = std::function<const LiveSet&(std::uint32_t kv_head)>;
  /// The next layer of these tokens; the live sets have them. `k`, `v`: the other decoder's.
  void layer(std::uint32_t layer, const LiveSets& live, std::span<const float> k,
             std::span<const float> v);
  /// Its own keys and values of the last layer, one after the other, where it attends over the
  /// other decoder's; else empty.
  const std::vector<float>& own_keys_and_values() const { return own_kv_; }
  /// The logits of the last of these tokens, after all layers: [vocab].
  std::vector<float> logits() const;

 private:
  void attend(std::uint32_t layer, std::uint32_t kv_head, const LiveSet& live);
  /// x [token, hidden] as a matrix product takes it.
  std::vector<float> rounded(std::vector<float> x) const;

  const Model& model_;
  const ModelConfig& config_;
  std::optional<Dtype> rounding_;
  bool quantizes_;
  unsigned threads_;
  std::vector<Float64Attention> attention_;  // by layer, and so are
  std::vector<GrowingRope> ropes_;
  std::deque<HeadTokens> heads_;  // [layer, kv_head]
  Append append_{};
  std::vector<float> x_, q_, k_, v_, out_, own_kv_;
};

}  // namespace kvlab
