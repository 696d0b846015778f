// Sums over a cache's live tokens, per thread and per thread block.
#pragma once

#include "kernels/replay/block.cuh"

namespace kvlab::kernels {

/// The sums over a cache's live tokens at one query, for each head: the sum of the cache's
/// exponentials and, if those of the full row differ (kOther), the sum of the full row's
/// exponentials of the same tokens. If the policy observes requests, there is also the largest
/// exponential of the cache.
template <int kHeadGroups, bool kOther, bool kNeedsRequests>
struct ReplayTotals {
  static constexpr int kHeads = 4 * kHeadGroups;
  static constexpr int kParts = 1 + (kOther ? 1 : 0) + (kNeedsRequests ? 1 : 0);
  static constexpr int kFullPart = kOther ? 1 : 0, kMaxPart = kParts - 1;

  HeadGroups<kHeadGroups> part[kParts];

  /// Adds a token to the cache's sums.
  __device__ void add_own(const HeadGroups<kHeadGroups>& e) {
#pragma unroll
    for (int head_group = 0; head_group < kHeadGroups; ++head_group) {
      add(part[0].head_group[head_group], e.head_group[head_group]);
      if (kNeedsRequests) raise(part[kMaxPart].head_group[head_group], e.head_group[head_group]);
    }
  }
  /// Combines the parts of all threads of the thread block. Lane l of every warp gets component l
  /// of all parts. `warp_totals` may be reused after the next barrier.
  __device__ float fold(float (*warp_totals)[24], const CacheThread& at) const {
    float* const to = warp_totals[at.warp];
#pragma unroll
    for (int p = 0; p < kParts; ++p)
#pragma unroll
      for (int head_group = 0; head_group < kHeadGroups; ++head_group) {
        const float4& x = part[p].head_group[head_group];
        const float folded =
            kNeedsRequests && p == kMaxPart ? warp_fold4(x, Larger{}) : warp_fold4(x, Add{});
        if (at.lane < 4) to[p * kHeads + 4 * head_group + at.lane] = folded;
      }
    __syncthreads();
    float value = 0;
    if (at.lane < kParts * kHeads) {
      const bool is_maximum = kNeedsRequests && at.lane >= kMaxPart * kHeads;
      for (std::uint32_t warp = 0; warp < at.warps; ++warp) {
        const float other = warp_totals[warp][at.lane];
        value = is_maximum ? fmaxf(value, other) : value + other;
      }
    }
    return value;
  }
};

}  // namespace kvlab::kernels
