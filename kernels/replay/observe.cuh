// Converts a token's exponentials at a query to the observation that is passed to the policy.
#pragma once

#include "kernels/device/mass_sum.hpp"
#include "kernels/replay/block.cuh"

namespace kvlab::kernels {

/// The lowest exponential of a token that counts as requested by a head, in a row with this sum and
/// this largest exponential.
__device__ inline float min_requested(float sum, float max_exponential, std::uint32_t threshold16) {
  const float p = request_floor(fixed_mass(1.0f, max_exponential * (1 / sum)), threshold16);
  return p < 0 ? 0.0f : p * sum;
}

/// The sum over four heads of e * over in Q32.32 (64-bit fixed point), where each product is
/// rounded once. Requires 0 <= e * over <= 1.5.
///
/// It differs from MassSum in that a product is not first rounded to float32. An fma that adds 64
/// rounds the product to a multiple of 2^-17, which is then in the low bits of the float. A second
/// fma rounds the remainder to a multiple of 2^-32 in the same way. Both parts are added as
/// integers.
__device__ inline std::uint64_t head_group_mass(const float4& e, const float4& over) {
  constexpr float kHigh = 64.0f, kLow = 1.5f / 512;
  const auto high = [](float a, float b) { return fmaf(a, b, kHigh); };
  const auto low = [](float a, float b, float upper) { return fmaf(a, b, (kHigh + kLow) - upper); };
  const float x = high(e.x, over.x), y = high(e.y, over.y), z = high(e.z, over.z),
              w = high(e.w, over.w);
  const auto bits = [](float value) { return __float_as_uint(value); };
  const std::uint32_t upper =
      bits(x) + bits(y) + bits(z) + bits(w) - 4 * std::bit_cast<std::uint32_t>(kHigh);
  const std::uint32_t lower = bits(low(e.x, over.x, x)) + bits(low(e.y, over.y, y)) +
                              bits(low(e.z, over.z, z)) + bits(low(e.w, over.w, w)) -
                              4 * std::bit_cast<std::uint32_t>(kLow);
  return (std::uint64_t{upper} << 15) +
         static_cast<std::uint64_t>(std::int64_t{static_cast<std::int32_t>(lower)});
}

/// How many tokens each head of the full row requests, among the tokens that one thread counts.
/// Empty slots are passed as exponentials of zero. A threshold of 0 would count them too, so
/// store_counts() handles rows that request every token separately.
template <int kHeadGroups>
class ReplayHits {
 public:
  __device__ explicit ReplayHits(const float4* request_threshold) {
#pragma unroll
    for (int head_group = 0; head_group < kHeadGroups; ++head_group)
      min_requested_.head_group[head_group] = request_threshold[head_group];
  }
  __device__ void count(const HeadGroups<kHeadGroups>& e) {
#pragma unroll
    for (int head_group = 0; head_group < kHeadGroups; ++head_group)
      count_from(hits_[head_group], e.head_group[head_group],
                 min_requested_.head_group[head_group]);
  }
  /// Adds the counts of the whole warp to `to` [head].
  __device__ void add_to(std::uint32_t* to, std::uint32_t lane) const {
#pragma unroll
    for (int head_group = 0; head_group < kHeadGroups; ++head_group) {
      const uint4 hits = hits_[head_group];
      const std::uint32_t low = __reduce_add_sync(~0u, hits.x | hits.y << 16),
                          high = __reduce_add_sync(~0u, hits.z | hits.w << 16);
      if (lane < 4)
        atomicAdd(to + 4 * head_group + lane, (lane < 2 ? low : high) >> (lane % 2 * 16) & 0xffff);
    }
  }

 private:
  HeadGroups<kHeadGroups> min_requested_;
  uint4 hits_[kHeadGroups] = {};
};

/// Converts the exponentials of one query to observations of the live tokens. kLargest: a token
/// receives the largest mass of the group's heads instead of the sum over the heads.
template <class P, int kHeadGroups, bool kLargest>
struct QueryLook {
  static constexpr bool kNeedsRequests = needs_requests(P::kInfo.needs);
  static constexpr bool kSums = needs_mass(P::kInfo.needs);
  HeadGroups<kHeadGroups> over;               ///< 1 / sum; 0 for padding heads
  HeadGroups<kHeadGroups> request_threshold;  ///< lowest exponential at which a head requests a
                                              ///< token; infinite for padding heads
  float weight;
  std::uint32_t query;

  /// Lane l passes `sum` and `max_exponential` (the largest exponential) of head l.
  __device__ QueryLook(float sum, float max_exponential, const CacheThread& at, float age_weight,
                       std::uint32_t query_index)
      : weight(age_weight), query(query_index) {
    const ReplayShape& shape = at.args.shape;
    const bool is_head = at.lane < static_cast<unsigned>(shape.group);
    if constexpr (kNeedsRequests) {
      float bound = __int_as_float(0x7f800000);
      if (is_head) bound = min_requested(sum, max_exponential, shape.threshold16);
      request_threshold = head_groups_of_lanes<kHeadGroups>(bound);
    }
    if constexpr (kSums) over = head_groups_of_lanes<kHeadGroups>(is_head ? 1 / sum : 0.0f);
  }

  __device__ Observation observation(const HeadGroups<kHeadGroups>& e) const {
    Observation seen{.queries = 1};
    if constexpr (kNeedsRequests) {
      seen.requests = has_request(e) ? 1 : 0;
      seen.last_request = query;
    }
    if constexpr (kSums) seen.mass = mass(e);
    return seen;
  }

 private:
  __device__ bool has_request(const HeadGroups<kHeadGroups>& e) const {
    bool any = false;
#pragma unroll
    for (int head_group = 0; head_group < kHeadGroups; ++head_group) {
      const float4 x = e.head_group[head_group], bound = request_threshold.head_group[head_group];
      any |= x.x >= bound.x || x.y >= bound.y || x.z >= bound.z || x.w >= bound.w;
    }
    return any;
  }
  __device__ std::uint64_t mass(const HeadGroups<kHeadGroups>& e) const {
    std::uint64_t sum = 0;
#pragma unroll
    for (int head_group = 0; head_group < kHeadGroups; ++head_group) {
      const float4 x = e.head_group[head_group], y = over.head_group[head_group];
      const auto take = [&](float p) {
        const std::uint64_t own = fixed_mass(weight, p);
        sum = kLargest ? max(sum, own) : sum + own;
      };
      if constexpr (kLargest || P::kInfo.weighted)
        take(x.x * y.x), take(x.y * y.y), take(x.z * y.z), take(x.w * y.w);
      else
        sum += head_group_mass(x, y);
    }
    return sum;
  }
};

}  // namespace kvlab::kernels
