// Rotary position embedding (RoPE) as traces define it: Hugging Face's half-rotation, with angles
// computed in float64.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "traces/base/numeric/dtype.hpp"

namespace kvlab {

/// RoPE with any scaling, as data: `inv_freq` [rotated / 2] and a factor on cos and sin.
struct Rope {
  std::vector<float> inv_freq;
  float factor = 1.0f;

  std::size_t rotated_dims() const { return 2 * inv_freq.size(); }
  bool operator==(const Rope&) const = default;
};

/// cos and sin of position * inv_freq for positions 0 … count-1, each [count, rotated / 2].
class RopeTable {
 public:
  RopeTable(const Rope& rope, std::uint32_t count);

  const Rope& rope() const { return rope_; }
  std::uint32_t positions() const { return positions_; }
  /// Cosines of the angles at `position`, [rotated / 2]. sines() returns the sines in the same
  /// shape.
  std::span<const float> cosines(std::uint32_t position) const {
    return {cos_.data() + position * half_, half_};
  }
  std::span<const float> sines(std::uint32_t position) const {
    return {sin_.data() + position * half_, half_};
  }
  /// Rotates one vector of `size` floats to `position`: dimensions i and i + rotated / 2 form a
  /// pair. Dimensions from `rotated` on are copied. x == y is allowed. Requires position <
  /// positions().
  void rotate(const float* x, std::size_t size, std::uint32_t position, float* y) const;

 private:
  Rope rope_;
  std::uint32_t positions_;
  std::size_t half_;
  std::vector<float> cos_, sin_;
};

}  // namespace kvlab
