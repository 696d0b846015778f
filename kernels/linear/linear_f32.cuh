// `linear` and `gated_linear` for float32 weights.
#pragma once

#include "kernels/linear/linear_run.cuh"

namespace kvlab::kernels {

cudaError_t launch_linear_f32(const LinearRun<float>& run, cudaStream_t stream);

}  // namespace kvlab::kernels
