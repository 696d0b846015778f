// `linear` and `gated_linear` for float32 weights.
#pragma once

#include "kernels/launch_plans.hpp"
#include "kernels/linear/linear_product.cuh"

namespace kvlab::kernels {

LaunchPlan plan_linear_f32(bool normed, int rows, int n, int k, const DeviceLimits& limits);
cudaError_t launch_linear_f32(const LinearProduct<float>& product, cudaStream_t stream);

}  // namespace kvlab::kernels
