// `linear` and `gated_linear` for float32 weights.
#pragma once

#include "kernels/linear/linear_product.cuh"

namespace kvlab::kernels {

cudaError_t launch_linear_f32(const LinearProduct<float>& product, cudaStream_t stream);

}  // namespace kvlab::kernels
