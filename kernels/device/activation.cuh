// Activations of a gate.
#pragma once

#include "kernels/types.hpp"

namespace kvlab::kernels {

__device__ inline float activate(Activation activation, float x) {
  if (activation == Activation::silu) return x / (1.0f + expf(-x));
  constexpr float kRoot2OverPi = 0.79788456080286535588f, kCubic = 0.044715f;
  return 0.5f * x * (1.0f + tanhf(kRoot2OverPi * fmaf(kCubic * x * x, x, x)));
}

/// activation(gate) * up; see gate().
__device__ inline float apply_gate(Activation activation, float clamp, float gate, float up) {
  if (clamp == 0) return activate(activation, gate) * up;
  const float g = fminf(gate, clamp), u = fminf(fmaxf(up, -clamp), clamp);
  return (u + 1.0f) * g / (1.0f + expf(-1.702f * g));
}

}  // namespace kvlab::kernels
