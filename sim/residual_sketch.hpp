// What an error of attention's outputs does to the residual stream: see `residual_error` in
// docs/metrics.md.
#pragma once

#include <cstdint>
#include <vector>

namespace kvlab {

/// Directions of the residual stream that errors are taken in, of the 64 that a trace has: fewer
/// keep units of work small (results.md), and all configurations are seen in the same ones.
inline constexpr std::uint32_t kResidualColumns = 32;

/// The output projection of one KV head's query heads, in those directions.
class ResidualSketch {
 public:
  /// `values` [group, head_size, kResidualColumns].
  ResidualSketch(std::vector<float> values, std::uint32_t head_size)
      : values_(std::move(values)), head_size_(head_size) {}

  const std::vector<float>& values() const { return values_; }
  /// to [kResidualColumns] += W_o (full - factor * kept), of query head `head` of the group; full
  /// and kept [head_size].
  void add(std::uint32_t head, const float* full, const float* kept, float factor, float* to) const;

 private:
  std::vector<float> values_;
  std::uint32_t head_size_;
};

}  // namespace kvlab
