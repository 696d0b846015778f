// Direct exponentials: the slow way to compute a cache's row. It is used if the fast ways lose
// precision. This happens, rarely, if the exponentials of the kept tokens are so small or so large,
// compared with the largest one of the full row, that the cache needs a separate maximum.
#pragma once

#include <type_traits>

#include "kernels/device/load.cuh"
#include "kernels/replay/block.cuh"

namespace kvlab::kernels {

/// One query and the slots of a cache.
struct DirectRow {
  const std::uint32_t *positions,
      *positions_in_cache;  ///< null at original positions
  std::uint32_t visible, query;
  std::int64_t task;
  float4* direct;  // [head group, slot], slots.task_stride apart
};

/// Limits of the sum of a head's exponentials e^(logit - m), where m is the maximum of the full
/// row. If all kept logits are far below m, the sum is below kLostSum. If a kept logit is far above
/// m, the sum is above kVastSum. In both cases, the exponentials have lost precision.
inline constexpr float kLostSum = 0x1p-60f, kVastSum = 0x1p60f;

/// Whether the sum of some head has lost precision. Lane l has the sum of head l. Called by a whole
/// warp.
__device__ inline bool is_lost(float sum, const ReplayShape& shape) {
  const bool is_head = threadIdx.x % kWarpSize < static_cast<unsigned>(shape.group);
  return __any_sync(~0u, is_head && !(sum >= kLostSum && sum <= kVastSum));
}

__device__ inline float round_to_type(float x, Type type) {
  if (type == KVLAB_BF16) return __bfloat162float(__float2bfloat16_rn(x));
  if (type == KVLAB_F16) return __half2float(__float2half_rn(x));
  return x;
}

/// The map from slots to copies if all tokens are exact.
struct ExactCopies {
  static constexpr bool kQuantized = false;
  __device__ constexpr int operator()(std::uint32_t) const { return 0; }
  __device__ constexpr int row_of(std::uint32_t) const { return 0; }
};

/// Element `at` [head task, token, dim] of a copy's keys or values. It is the sum of its parts; the
/// largest part is added last.
__device__ inline float load_copy(const ReplayCopies& copies, const void* data, Type type, int copy,
                                  std::int64_t at) {
  float sum = 0;
  at += copies.first_part(copy, type);
  for (int part = replay_parts(type) - 1; part >= 0; --part)
    sum += load1(data, type, at + part * copies.vectors);
  return sum;
}

/// A token that a query attends to. The query is rotated to its original position. The token's key
/// is rotated to its original position or, with cache positions, to its cache position.
struct AttendedToken {
  std::int64_t task;
  std::uint32_t query, position, position_in_cache;
  bool cache_positions;
};

/// cos and sin of pair d. At original positions they come from the table `rope`. At cache positions
/// they are combined from the angle of the largest multiple of 64 in the cache position and the
/// angle of the remainder.
__device__ inline float2 angle_of(const ReplayShape& shape, const ReplayTensors& tensors,
                                  const AttendedToken& token, int d) {
  const int half = shape.rotated / 2, pairs = shape.pairs();
  if (!token.cache_positions) return tensors.rope[std::int64_t{token.position} * half + d];
  const std::uint32_t position_in_cache = token.position_in_cache;
  const float2 a = tensors.coarse[std::int64_t{position_in_cache >> 6} * pairs + d],
               b = tensors.fine[(position_in_cache & 63) * pairs + d];
  return {fmaf(a.x, b.x, -(a.y * b.y)), fmaf(a.x, b.y, a.y * b.x)};
}

/// The product of a head's query with a key, computed by a warp. `element` returns elements of the
/// key. The first `rotated` of them have not been rotated yet.
template <class Element>
__device__ float product_of(const ReplayShape& shape, const ReplayTensors& tensors,
                            const AttendedToken& token, int head, int rotated, Element element) {
  const Type rounding = token.cache_positions ? KVLAB_F32 : shape.rounding;
  const int half = rotated / 2, lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const float* const query = tensors.queries + shape.vector(token.task, token.query) * shape.group +
                             head * shape.head_size;
  float sum = 0;
  for (int d = lane; d < half; d += kWarpSize) {
    const float2 angle = angle_of(shape, tensors, token, d);
    const float x = element(d), y = element(d + half);
    sum = fmaf(round_to_type(query[d], rounding),
               round_to_type(x * angle.x - y * angle.y, rounding), sum);
    sum = fmaf(round_to_type(query[d + half], rounding),
               round_to_type(y * angle.x + x * angle.y, rounding), sum);
  }
  for (int d = rotated + lane; d < shape.head_size; d += kWarpSize)
    sum = fmaf(round_to_type(query[d], rounding), element(d), sum);
  return warp_sum(sum);
}
__device__ inline float direct_product(const ReplayShape& shape, const ReplayTensors& tensors,
                                       const AttendedToken& token, int head) {
  const std::int64_t key = shape.vector(token.task, token.position);
  return product_of(shape, tensors, token, head, shape.rotated,
                    [&](int d) { return load1(tensors.keys, shape.type, key + d); });
}
/// Like the function above, with the token's key in copy 1 or later.
__device__ inline float copied_product(const ReplayShape& shape, const ReplayTensors& tensors,
                                       const ReplayCopies& copies, const AttendedToken& token,
                                       int head, int copy) {
  const std::int64_t key = shape.vector(token.task, token.position);
  return product_of(shape, tensors, token, head, 0, [&](int d) {
    return load_copy(copies, copies.keys, shape.rounding, copy, key + d);
  });
}

/// Computes the exponentials of all slots into row.direct, scaled so that the largest is 1. Called
/// by the whole thread block. `scratch` has one float per warp. `Copies` is ExactCopies or another
/// map from slots to copies.
template <class Copies>
__device__ __noinline__ inline void take_direct_row(const ReplayWalkArgs& args, DirectRow row,
                                                    const Copies copies, float* scratch) {
  const ReplayShape& shape = args.shape;
  const std::uint32_t warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize,
                      warps = blockDim.x / kWarpSize;
  for (int head = 0; head < 4 * shape.head_groups(); ++head) {
    float* const direct =
        reinterpret_cast<float*>(row.direct + head / 4 * args.slots.task_stride) + head % 4;
    const bool is_head = head < shape.group;
    float max_logit = -3.4e38f;
    for (std::uint32_t slot = warp; slot < row.visible; slot += warps) {
      const AttendedToken token{row.task, row.query, row.positions[slot],
                                row.positions_in_cache ? row.positions_in_cache[slot] : 0,
                                row.positions_in_cache != nullptr};
      const auto product = [&] {
        if constexpr (Copies::kQuantized)
          if (const int copy = copies(slot); copy > 0)
            return copied_product(shape, args.tensors, copies.all, token, head, copy);
        return direct_product(shape, args.tensors, token, head);
      };
      const float logit = is_head ? product() * shape.softmax_scale : 0.0f;
      max_logit = fmaxf(max_logit, logit);
      if (lane == 0) direct[4 * slot] = logit;
    }
    __syncthreads();
    if (lane == 0) scratch[warp] = max_logit;
    __syncthreads();
    for (std::uint32_t w = 0; w < warps; ++w) max_logit = fmaxf(max_logit, scratch[w]);
    for (std::uint32_t slot = threadIdx.x; slot < row.visible; slot += blockDim.x)
      direct[4 * slot] = is_head ? expf(direct[4 * slot] - max_logit) : 0.0f;
  }
  __syncthreads();
}

/// The terms of one query (the products of its gradients and the values).
struct QueryTerms {
  const float* first;   // [token, gradient sample, group]
  std::int64_t stride;  ///< floats from one token to the next
  int columns;          ///< number of gradient samples times group

  __device__ QueryTerms(const ReplayShape& shape, const ReplayTerms& terms, std::int64_t task,
                        int index)
      : columns(terms.gradient_samples * shape.group) {
    stride = std::int64_t{kMaxReplayQueries} * columns;
    first = terms.data + task * shape.tokens * stride + std::int64_t{index - terms.first} * columns;
  }
  __device__ float at(std::uint32_t token, int column) const {
    return first[token * stride + column];
  }
  /// The same query's terms for the values of a copy.
  __device__ QueryTerms of_copy(const ReplayCopies& copies, int copy) const {
    QueryTerms terms = *this;
    terms.first += copy * copies.terms;
    return terms;
  }
};

/// Direct exponentials of a cache, and the tokens whose values they are multiplied by: those in
/// slots [0, count) whose position is below `end`.
struct DirectValues {
  const std::uint32_t* positions;  ///< by slot
  std::uint32_t count, end;
  std::int64_t task;
  const float4* direct;  // [head group, slot], slots.task_stride apart
};

/// Multiplies exponentials by terms, and writes the sums over the tokens to `to` [gradient sample,
/// group]. Called by the whole thread block; each warp computes the sums of every n-th column,
/// where n is the number of warps.
template <class Copies>
__device__ __noinline__ inline void sum_direct_terms(const ReplayWalkArgs& args,
                                                     DirectValues values, QueryTerms terms,
                                                     const Copies copies, float* to) {
  const std::uint32_t lane = threadIdx.x % kWarpSize;
  for (int column = static_cast<int>(threadIdx.x / kWarpSize); column < terms.columns;
       column += static_cast<int>(blockDim.x / kWarpSize)) {
    const int head = column % args.shape.group;
    const float4* const direct = values.direct + head / 4 * args.slots.task_stride;
    const auto term = [&](std::uint32_t slot, std::uint32_t position) {
      if constexpr (Copies::kQuantized)
        return terms.of_copy(copies.all, copies(slot)).at(position, column);
      else
        return terms.at(position, column);
    };
    float sum = 0;
    for (std::uint32_t slot = lane; slot < values.count; slot += kWarpSize) {
      const std::uint32_t position = values.positions[slot];
      if (position < values.end)
        sum = fmaf(component(direct[slot], head % 4), term(slot, position), sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) to[column] = sum;
  }
}

/// Four elements of a value, in their storage format.
template <class T>
using FourBits = std::conditional_t<sizeof(T) == 4, uint4, uint2>;

/// The values (four elements each) and the exponentials of some tokens.
template <class Bits, int kTokens, int kHeadGroups>
struct DirectTokens {
  Bits value[kTokens];
  float4 e[kTokens][kHeadGroups];
};

/// Multiplies exponentials by values, and writes the sums over the tokens to `to` [group, dim].
/// They are not divided by the sum of exponentials. Called by the whole thread block: the warps
/// share the tokens, and each lane computes four dimensions of all heads. Not inlined, because it
/// would use registers that its caller needs. `Bits` is the type that holds four elements of a
/// value.
template <int kHeadGroups, class Bits>
__device__ __noinline__ void sum_direct_values(const ReplayWalkArgs& args,
                                               DirectValues direct_values,
                                               float (*scratch)[kReplayDims], float* to) {
  constexpr int kHeads = 4 * kHeadGroups, kAtOnce = 8 / kHeadGroups,
                kSums = kReplayScratch / kHeads;
  const ReplayShape& shape = args.shape;
  const std::uint32_t warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize,
                      warps = blockDim.x / kWarpSize;
  const Bits* const values =
      static_cast<const Bits*>(args.tensors.values) + shape.vector(direct_values.task, 0) / 4;
  using Tokens = DirectTokens<Bits, kAtOnce, kHeadGroups>;
  for (int first = 0; first < shape.head_size; first += kReplayDims) {
    const int d = first + 4 * static_cast<int>(lane);
    float4 sums[kHeads] = {};
    const auto fetch = [&](std::uint32_t base) {
      Tokens tokens;
#pragma unroll
      for (std::uint32_t n = 0; n < kAtOnce; ++n) {
        const std::uint32_t slot = base + n, position = slot < direct_values.count
                                                            ? direct_values.positions[slot]
                                                            : direct_values.end;
        const bool is = position < direct_values.end;
        const std::int64_t at = (std::int64_t{position} * shape.head_size + d) / 4;
        tokens.value[n] = is && d < shape.head_size ? __ldg(values + at) : Bits{};
#pragma unroll
        for (int head_group = 0; head_group < kHeadGroups; ++head_group)
          tokens.e[n][head_group] =
              is ? direct_values.direct[head_group * args.slots.task_stride + slot] : float4{};
      }
      return tokens;
    };
    Tokens ahead = fetch(warp * kAtOnce);
    for (std::uint32_t base = warp * kAtOnce; base < direct_values.count; base += warps * kAtOnce) {
      const Tokens tokens = ahead;
      ahead = fetch(base + warps * kAtOnce);
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const float2 low = two_of(tokens.value[n], shape.type, 0),
                     high = two_of(tokens.value[n], shape.type, 1);
#pragma unroll
        for (int head = 0; head < kHeads; ++head)
          add_product(sums[head], component(tokens.e[n][head / 4], head % 4),
                      {low.x, low.y, high.x, high.y});
      }
    }
    // `scratch` holds kSums partial sums. In each round, kSums warps add their results to one
    // partial sum each. Then the partial sums are added. The order is fixed, so the result is the
    // same every time.
    for (std::uint32_t round = 0; round * kSums < warps; ++round) {
      if (warp / kSums == round)
#pragma unroll
        for (int head = 0; head < kHeads; ++head) {
          float4& sum =
              *reinterpret_cast<float4*>(&scratch[warp % kSums * kHeads + head][4 * lane]);
          if (round > 0) add(sums[head], sum);
          sum = sums[head];
        }
      __syncthreads();
    }
    for (std::uint32_t n = threadIdx.x; n < shape.group * kWarpSize; n += blockDim.x) {
      const std::uint32_t head = n / kWarpSize, at = 4 * (n % kWarpSize);
      if (first + static_cast<int>(at) >= shape.head_size) continue;
      float4 sum{};
      for (std::uint32_t part = 0; part < min(kSums, warps); ++part)
        add(sum, *reinterpret_cast<const float4*>(&scratch[part * kHeads + head][at]));
      *reinterpret_cast<float4*>(to + head * shape.head_size + first + at) = sum;
    }
    __syncthreads();
  }
}

}  // namespace kvlab::kernels
