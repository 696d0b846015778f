// All element-wise operations between the matrix products: embedding, norm, RoPE and cache write,
// gate, sampling.
#pragma once

#include "kernels/types.hpp"

namespace kvlab::kernels {

/// The widths of embed, rms_norm, add_normed, squared_norms and gate must be multiples of 8.

/// x[t] = scale * table[ids[t]] in float32. NaN if the id is below 0 (see SampleArgs).
cudaError_t embed(Type type, const void* table, int hidden, float scale, const std::int32_t* ids,
                  int tokens, float* x, cudaStream_t stream);

/// y[t] = x[t] / rms(x[t]) * (offset + gamma), rounded to `type`; without a gamma, y[t] = x[t]
/// rounded.
cudaError_t rms_norm(Type type, const float* x, const Norm& norm, int tokens, int hidden, void* y,
                     cudaStream_t stream);
/// x[t] += norm of y[t] (see rms_norm()), not rounded.
cudaError_t add_normed(Type type, const float* y, const Norm& norm, int tokens, int hidden,
                       float* x, cudaStream_t stream);

/// y[t] = norm of y[t], of `type`. Rows begin `stride` elements apart.
cudaError_t norm_in_place(Type type, void* y, std::int64_t stride, const Norm& norm, int tokens,
                          int width, cudaStream_t stream);

/// norms[t] = the sum of the squares of x[t].
cudaError_t squared_norms(const float* x, int tokens, int hidden, float* norms,
                          cudaStream_t stream);

/// x += y; y is of `type`.
cudaError_t add_residual(Type type, const void* y, std::size_t count, float* x,
                         cudaStream_t stream);

/// y[t, n] = activation(g) * u with g = gate_up[t, n] and u = gate_up[t, width + n]. If `clamp` is
/// not 0, y[t, n] = g / (1 + e^(-1.702 g)) * (u + 1), with g limited to at most clamp and u to
/// [-clamp, clamp].
cudaError_t gate(Type type, Activation activation, float clamp, const void* gate_up, int tokens,
                 int width, void* y, cudaStream_t stream);

/// Splits a projection into q, k and v. If gammas are given, normalizes q and k per head and rounds
/// the result to the type, because a trace captures the rounded values. Rotates q and k in float32
/// by the cos/sin of the token's position, and rounds them. Writes q to `q`, and k and v to the
/// cache: to the slots of pairs or, without first_slot, to [sequence, kv_head, slot, dim].
struct RopeWriteArgs : kvlab_write_args {
  std::int64_t sequence_stride = 0, head_stride = 0;  ///< in elements, without first_slot
  int ring = 0;  ///< without first_slot: slots are taken modulo `ring`; 0: slots are used unchanged
  const void *q_gamma = nullptr, *k_gamma = nullptr;  // [head_size] of type, or null
  float norm_epsilon = 0, norm_offset = 0;            ///< see Norm
  /// For capture in a trace: q and k after the norms and before RoPE, of `type`, are also written
  /// here. May be null.
  void *plain_q = nullptr, *plain_k = nullptr;  // [token, query_head, dim], [token, kv_head, dim]
};
cudaError_t rope_write(const RopeWriteArgs& args, cudaStream_t stream);
bool valid(const RopeWriteArgs& args);

/// Samples one id per row. Temperature 0 is greedy; among equal logits it takes the lowest id.
/// Otherwise logits are divided by the temperature, top-k and top-p limit the ids, and one of these
/// ids is drawn by inverse transform. The random number is a function of seed[row] and
/// counter[row]. The samples are those of engine/sampler.hpp, except that probabilities are
/// float32. The id is -1 if the row's largest logit is not finite. A vocab has at most 2^18 ids.
struct SampleArgs {
  int rows, vocab;
  const float* logits;               // [row, vocab]
  const float *temperature, *top_p;  // [row], device
  const std::int32_t* top_k;         // [row], device; 0: no limit
  const std::uint64_t* seed;         // [row], device
  std::uint64_t* counter;            // [row], device; the call adds 1
  std::int32_t* ids;                 // [row]
  void* workspace;                   // sample_workspace() bytes
};
std::size_t sample_workspace(int rows, int vocab);
cudaError_t sample(const SampleArgs& args, cudaStream_t stream);

}  // namespace kvlab::kernels
