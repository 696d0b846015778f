// What bends a gate.
#pragma once

#include "kernels/types.hpp"

namespace kvlab::kernels {

__device__ inline float activated(Activation activation, float x) {
  if (activation == Activation::silu) return x / (1.0f + expf(-x));
  constexpr float kRoot2OverPi = 0.79788456080286535588f, kCubic = 0.044715f;
  return 0.5f * x * (1.0f + tanhf(kRoot2OverPi * fmaf(kCubic * x * x, x, x)));
}

}  // namespace kvlab::kernels
