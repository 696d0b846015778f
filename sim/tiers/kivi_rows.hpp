// Attention over what KIVI keeps: all tokens, the older ones quantized without a Hadamard rotation.
#pragma once

#include <span>
#include <vector>

#include "sim/quantized_rows.hpp"

namespace kvlab {

/// Keys after RoPE are quantized by channel in groups of kQuantBlock tokens, values by token. Both
/// have an fp16 minimum and an fp16 scale, which is never 0.
void quantize_keys(std::span<float> keys, std::size_t dim, int bits);

/// A token's age equals its position, because nothing is evicted.
class KiviRows : public KeptRows {
 public:
  KiviRows(const KvFormat& format, const HeadView& view, const RopeTable& rope,
           const HeadArithmetic& arithmetic)
      : format_(format),
        view_(view),
        rope_(rope),
        arithmetic_(arithmetic),
        keys_(0, view.head_size) {}

  void update(const LiveSet& live, std::uint32_t visible, std::uint32_t exact_from) override;
  bool all_exact() const override { return quantized_keys_ == 0 && quantized_values_ == 0; }
  void logits(std::uint32_t query, std::uint32_t head, SharedRows& rows, float* to) override;
  void accumulate(std::span<const float> p, std::span<float> out) override;

 private:
  const KvFormat& format_;
  HeadView view_;
  const RopeTable& rope_;
  HeadArithmetic arithmetic_;
  Panels keys_;                // [token, dim], quantized
  std::vector<float> values_;  // [token, dim], quantized
  std::uint32_t visible_ = 0, quantized_keys_ = 0, quantized_values_ = 0;
  std::vector<std::uint32_t> tokens_;  // 0, 1, 2, …
  std::vector<float> products_;
};

}  // namespace kvlab
