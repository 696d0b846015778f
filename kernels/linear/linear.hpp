// The products of a decode step: a few rows of activations times a weight matrix that is read once.
#pragma once

#include "kernels/pointwise.hpp"
#include "kernels/types.hpp"

namespace kvlab::kernels {

/// Maximum number of rows for `linear`. Larger products use cuBLASLt.
inline constexpr int kMaxLinearRows = 8;

/// The form of a product. It determines what is computed, and which weight rows make up the two
/// tiles of a strip.
enum class Form {
  plain,    // sixteen consecutive rows
  normed,   // sixteen consecutive rows, times norm(x)
  gated,    // eight rows of the gate and the same eight rows of up, times norm(x)
  rotated,  // eight rows of a head's first half and the rows that RoPE pairs with them, times
            // norm(x)
};
/// y[r, n] = epilogue(sum over k of W[n, k] * norm(x)[r, k]). norm(x) is not rounded to `type`; it
/// has a precision of at least 16 bits. A row's result does not depend on the other rows. On sm_90
/// a launch starts before the preceding kernel of the stream has ended, and may read weight, gamma
/// and bias immediately. So the preceding kernel must not write these three.
struct LinearArgs {
  Type type;           ///< of x, weight, gamma, bias, y; residual streams are float32
  int rows, n, k;      ///< rows <= kMaxLinearRows; k a multiple of 8
  const void* weight;  // [n, k]
  const void* x;       // [rows, k] of `type`; with `gamma`: float32, the residual stream
  const void* gamma;   // [k] of `type`, or null: no norm
  float norm_epsilon;
  const void* bias;  // [n], or null
  /// Exactly one of the next three is set.
  void* y;                // [rows, n] of `type`
  float* y_float;         // [rows, n]: logits
  float* residual;        // [rows, n]: the product is added to it
  float norm_offset = 0;  ///< see Norm::offset
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
  float norm_offset = 0;  ///< see Norm::offset
  Activation activation = Activation::silu;
};
cudaError_t gated_linear(const GatedLinearArgs& args, cudaStream_t stream);

/// `linear` with a norm, then `rope_write` of its y. Requires args.y == rope.qkv and args.rows ==
/// rope.tokens. Runs as one launch if the type has 2 bytes, heads are not normed, head_size ==
/// rotated, head_size is a multiple of 16, plain_q and plain_k are null, and the cache is not in
/// pages. Otherwise it runs as two launches, which give the same bits. The preceding kernel may
/// write all memory that `rope` points to.
cudaError_t linear_rope_write(const LinearArgs& args, const RopeWriteArgs& rope,
                              cudaStream_t stream);

}  // namespace kvlab::kernels
