// A forward pass of the model on the CPU over the tokens and live sets of another decoder. `kvlab
// verify` compares that decoder's logits with it. If tiers quantize, the forward pass attends over
// the other decoder's keys and values. Otherwise a difference in the last bit could move a
// quantized element by a whole step, which would change everything after it.
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
  /// `model` must outlive this object. `rounding`: the dtype to which inputs of matrix products,
  /// queries, keys, values and attention are rounded, as in a plain engine of that dtype.
  ForcedDecoder(const Model& model, const ResolvedConfig& cache, std::optional<Dtype> rounding,
                unsigned threads);

  /// Begins an append of tokens from position `first` on.
  void begin(std::span<const std::int32_t> ids, std::uint32_t first);
  using LiveSets = std::function<const LiveSet&(std::uint32_t kv_head)>;
  /// Computes the next layer. The live sets already contain the tokens of the append. `k`, `v`: the
  /// other decoder's keys and values of this layer.
  void layer(std::uint32_t layer, const LiveSets& live, std::span<const float> k,
             std::span<const float> v);
  /// If this decoder attends over the other decoder's keys and values: the keys and then the values
  /// that it computes itself in the latest layer. Otherwise empty.
  const std::vector<float>& own_keys_and_values() const { return own_kv_; }
  /// The logits [vocab] of the last token, after all layers.
  std::vector<float> logits() const;

 private:
  void attend(std::uint32_t layer, std::uint32_t kv_head, const LiveSet& live);
  /// x [token, hidden] rounded as the input of a matrix product.
  std::vector<float> round_values(std::vector<float> x) const;

  const Model& model_;
  const ModelConfig& config_;
  std::optional<Dtype> rounding_;
  bool quantizes_;
  unsigned threads_;
  std::vector<Float64Attention> attention_;  // [layer], like the next member
  std::vector<GrowingRope> ropes_;
  std::deque<HeadTokens> heads_;  // [layer, kv_head]
  Append append_{};
  std::vector<float> x_, q_, k_, v_, out_, own_kv_;
};

}  // namespace kvlab
