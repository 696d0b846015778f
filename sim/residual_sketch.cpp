#include "sim/residual_sketch.hpp"

namespace kvlab {

void ResidualSketch::add(std::uint32_t head, const float* full, const float* kept, float factor,
                         float* to) const {
  const float* row = values_.data() + std::size_t{head} * head_size_ * kResidualColumns;
  float sums[kResidualColumns] = {};
  for (std::uint32_t d = 0; d < head_size_; ++d, row += kResidualColumns) {
    const float difference = full[d] - factor * kept[d];
    for (std::uint32_t c = 0; c < kResidualColumns; ++c) sums[c] += difference * row[c];
  }
  for (std::uint32_t c = 0; c < kResidualColumns; ++c) to[c] += sums[c];
}

}  // namespace kvlab
