// Fills tables on the device: consecutive integers, and cosines and sines of RoPE.
#pragma once

#include "kernels/types.hpp"

namespace kvlab::kernels {

/// to[i] = i.
cudaError_t fill_iota(std::int32_t* to, int count, cudaStream_t stream);
/// table[row, i] = (cos, sin) of positions[row] * inv_freq[i] (angles in float64), times `factor`.
/// If positions is null, the position is first + row. A position below 0 (an idle row) counts as 0.
cudaError_t fill_rope_rows(const float* inv_freq, int half, const std::int32_t* positions,
                           std::uint32_t first, int rows, float factor, float2* table,
                           cudaStream_t stream);

}  // namespace kvlab::kernels
