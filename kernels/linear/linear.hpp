// Products of one decode step: a few rows of activations by a weight matrix that is read once.
#pragma once

#include "kernels/pointwise.hpp"
#include "kernels/types.hpp"

namespace kvlab::kernels {

/// Rows that `linear` takes; more are cuBLASLt's.
inline constexpr int kMaxLinearRows = 8;

/// What a product computes, and which weight rows the two tiles of a strip are.
enum class Form {
  plain,    // sixteen rows below each other
  normed,   // the same, of norm(x)
  gated,    // eight of the gate and the same eight of up, of norm(x)
  rotated,  // eight of a head's first half and those that RoPE rotates them with, of norm(x)
};
/// y[r, n] = epilogue(sum over k of W[n, k] * norm(x)[r, k]). norm(x) is not rounded to `type`: it
/// counts to 16 bits and more. A row's result does not depend on the rows beside it. On sm_90 a
/// launch starts before the kernel ahead of it in the stream has ended, and reads weight, gamma and
/// bias at once: that kernel must not write them.
struct LinearArgs {
  Type type;           ///< of x, weight, gamma, bias, y; residual streams are float32
  int rows, n, k;      ///< rows <= kMaxLinearRows; k a multiple of 8
  const void* weight;  // [n, k]
  const void* x;       // [rows, k] of `type`; with `gamma`: float32, the residual stream
  const void* gamma;   // [k] of `type`, or null: no norm
  float norm_epsilon;
  const void* bias;  // [n], or null
  /// Exactly one of the three:
  void* y;                // [rows, n] of `type`
  float* y_float;         // [rows, n]: logits
  float* residual;        // [rows, n]: += the product
  float norm_offset = 0;  ///< as Norm::offset
};
cudaError_t linear(const LinearArgs& args, cudaStream_t stream);

/// y[r, n] = activation(gate[n] . norm(x)[r]) * (up[n] . norm(x)[r]).
struct GatedLinearArgs {
  Type type;
  int rows, n, k;
  const void *gate, *up;  // [n, k]
  const float* x;         // [rows, k], the residual stream
  const void* gamma;      // [k]
  float norm_epsilon;
  void* y;                // [rows, n] of `type`
  float norm_offset = 0;  ///< as Norm::offset
  Activation activation = Activation::silu;
};
cudaError_t gated_linear(const GatedLinearArgs& args, cudaStream_t stream);

/// `linear` with a norm, then `rope_write` of its y: args.y == rope.qkv, args.rows == rope.tokens.
/// One launch, equal to the two bit for bit, where the type has two bytes, heads are not normed,
/// head_size == rotated and head_size is a multiple of 16; else two. All that `rope` points to may
/// be written by the kernel ahead.
cudaError_t linear_rope_write(const LinearArgs& args, const RopeWriteArgs& rope,
                              cudaStream_t stream);

}  // namespace kvlab::kernels
