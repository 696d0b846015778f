// The slow way to a cache's exponentials, for rows where the fast ways lose bits: what it keeps is
// so small beside the full row's largest exponential, or so large, that the row needs its own
// maximum. Seldom called.
#pragma once

#include "kernels/device/load.cuh"
#include "kernels/replay/block.cuh"

namespace kvlab::kernels {

/// The slots of a cache and one query.
struct OwnRow {
  const std::uint32_t *positions, *places;  ///< places: null where positions are original
  std::uint32_t visible, query;
  std::int64_t unit;
  float4* own;  // [quad, slot], unit_slots apart
};

/// Below this sum, exponentials taken with the maximum of a larger row have lost bits; above the
/// other, with that of a smaller row.
inline constexpr float kLostSum = 0x1p-60f, kVastSum = 0x1p60f;

/// Whether some head's sum, of lane l for head l, is: by a warp.
__device__ inline bool is_lost(float sum, const ReplayPlace& at) {
  const bool is_head = at.lane < static_cast<unsigned>(at.args.shape.group);
  return __any_sync(~0u, is_head && !(sum >= kLostSum && sum <= kVastSum));
}

__device__ inline float rounded(float x, Type type) {
  if (type == Type::bf16) return __bfloat162float(__float2bfloat16_rn(x));
  if (type == Type::f16) return __half2float(__float2half_rn(x));
  return x;
}

/// Of which copy a slot's token is, where all are exact.
struct ExactCopies {
  __device__ constexpr int operator()(std::uint32_t) const { return 0; }
};

/// Element `at` [unit, token, dim] of a copy's keys or values: the sum of its parts, the largest
/// last.
__device__ inline float copied(const ReplayCopies& copies, const void* data, Type type, int copy,
                               std::int64_t at) {
  float sum = 0;
  at += copies.first_part(copy, type);
  for (int part = replay_parts(type) - 1; part >= 0; --part)
    sum += load1(data, type, at + part * copies.vectors);
  return sum;
}

/// A token that a query attends. The query keeps its true position, and a squeezed token stands at
/// its place.
struct OwnToken {
  std::int64_t unit;
  std::uint32_t query, position, place;
  bool squeezed;
};

/// cos and sin of pair d: exact where keys are rounded, else of the place's multiple of 64 and of
/// the rest.
__device__ inline float2 angle_of(const ReplayArgs& args, const OwnToken& token, int d) {
  const int half = args.shape.rotated / 2, pairs = args.shape.pairs();
  if (!token.squeezed) return args.tensors.rope[std::int64_t{token.position} * half + d];
  const std::uint32_t place = token.place;
  const float2 a = args.tensors.coarse[std::int64_t{place >> 6} * pairs + d],
               b = args.tensors.fine[(place & 63) * pairs + d];
  return {fmaf(a.x, b.x, -(a.y * b.y)), fmaf(a.x, b.y, a.y * b.x)};
}

/// The product of a head's query with a token's key, by a warp.
__device__ inline float own_product(const ReplayArgs& args, const OwnToken& token, int head) {
  const ReplayShape& shape = args.shape;
  const Type rounding = token.squeezed ? Type::f32 : shape.rounding;
  const int half = shape.rotated / 2;
  const float* const query =
      args.tensors.queries +
      ((token.unit * shape.tokens + token.query) * shape.group + head) * shape.head_size;
  const std::int64_t key = (token.unit * shape.tokens + token.position) * shape.head_size;
  const auto element = [&](int d) { return load1(args.tensors.keys, args.tensors.type, key + d); };
  float sum = 0;
  for (int d = static_cast<int>(threadIdx.x) % kWarpSize; d < half; d += kWarpSize) {
    const float2 angle = angle_of(args, token, d);
    const float x = element(d), y = element(d + half);
    sum = fmaf(rounded(query[d], rounding), rounded(x * angle.x - y * angle.y, rounding), sum);
    sum =
        fmaf(rounded(query[d + half], rounding), rounded(y * angle.x + x * angle.y, rounding), sum);
  }
  for (int d = shape.rotated + static_cast<int>(threadIdx.x) % kWarpSize; d < shape.head_size;
       d += kWarpSize)
    sum = fmaf(rounded(query[d], rounding), element(d), sum);
  return warp_sum(sum);
}

/// Likewise with its key of a copy from 1 on.
__device__ inline float copied_product(const ReplayArgs& args, const OwnToken& token, int head,
                                       int copy) {
  const ReplayShape& shape = args.shape;
  const float* const query =
      args.tensors.queries +
      ((token.unit * shape.tokens + token.query) * shape.group + head) * shape.head_size;
  const std::int64_t key = (token.unit * shape.tokens + token.position) * shape.head_size;
  float sum = 0;
  for (int d = static_cast<int>(threadIdx.x) % kWarpSize; d < shape.head_size; d += kWarpSize)
    sum = fmaf(rounded(query[d], shape.rounding),
               copied(args.copies, args.copies.keys, shape.rounding, copy, key + d), sum);
  return warp_sum(sum);
}

/// All slots' exponentials, the largest 1, to row.own: by the whole block. `scratch`: a float for
/// each warp.
template <class Copies>
__device__ __noinline__ inline void take_own_row(const ReplayArgs& args, OwnRow row,
                                                 const Copies copies, float* scratch) {
  const ReplayShape& shape = args.shape;
  const std::uint32_t warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize,
                      warps = blockDim.x / kWarpSize;
  for (int head = 0; head < 4 * shape.quads(); ++head) {
    float* const own =
        reinterpret_cast<float*>(row.own + head / 4 * args.caches.unit_slots) + head % 4;
    const bool is_head = head < shape.group;
    float most = -3.4e38f;
    for (std::uint32_t slot = warp; slot < row.visible; slot += warps) {
      const OwnToken token{row.unit, row.query, row.positions[slot],
                           row.places ? row.places[slot] : 0, row.places != nullptr};
      const int copy = copies(slot);
      const auto product = [&] {
        return copy > 0 ? copied_product(args, token, head, copy) : own_product(args, token, head);
      };
      const float logit = is_head ? product() * shape.softmax_scale : 0.0f;
      most = fmaxf(most, logit);
      if (lane == 0) own[4 * slot] = logit;
    }
    __syncthreads();
    if (lane == 0) scratch[warp] = most;
    __syncthreads();
    for (std::uint32_t w = 0; w < warps; ++w) most = fmaxf(most, scratch[w]);
    for (std::uint32_t slot = threadIdx.x; slot < row.visible; slot += blockDim.x)
      own[4 * slot] = is_head ? expf(own[4 * slot] - most) : 0.0f;
  }
  __syncthreads();
}

}  // namespace kvlab::kernels
