// Stores neighbouring float32 values as a type known at run time.
#pragma once

#include "kernels/device/tensor_core.cuh"
#include "kernels/types.hpp"

namespace kvlab::kernels {

/// Stores elements `at` and at + 1; `at` must be even.
__device__ inline void store2(void* data, Type type, std::int64_t at, const float2& x) {
  if (type == KVLAB_F32)
    *reinterpret_cast<float2*>(static_cast<float*>(data) + at) = x;
  else
    *reinterpret_cast<std::uint32_t*>(static_cast<char*>(data) + 2 * at) =
        type == KVLAB_BF16 ? pack<__nv_bfloat16>(x.x, x.y) : pack<__half>(x.x, x.y);
}

}  // namespace kvlab::kernels
