// Sums over a cache's live tokens, by a thread and over its block.
#pragma once

#include "kernels/replay/block.cuh"

namespace kvlab::kernels {

/// What a step adds up, in parts of a quad's heads each: the cache's exponentials; those of the
/// full row, where they are others (kOther); the largest, if the policy asks for requests.
template <int kQuads, bool kOther, bool kAsks>
struct ReplayTotals {
  static constexpr int kHeads = 4 * kQuads;
  static constexpr int kParts = 1 + (kOther ? 1 : 0) + (kAsks ? 1 : 0);
  static constexpr int kFullPart = kOther ? 1 : 0, kMostPart = kParts - 1;

  Quads<kQuads> part[kParts];

  /// A token's, to the cache's sums.
  __device__ void add_own(const Quads<kQuads>& e) {
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      add(part[0].quad[quad], e.quad[quad]);
      if (kAsks) raise(part[kMostPart].quad[quad], e.quad[quad]);
    }
  }
  /// Over the block: lane l of every warp gets component l of all parts. `of_warps`: free again
  /// after the next barrier.
  __device__ float fold(float (*of_warps)[24], const CacheThread& at) const {
    float* const to = of_warps[at.warp];
#pragma unroll
    for (int p = 0; p < kParts; ++p)
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        const float4& x = part[p].quad[quad];
        const float folded =
            kAsks && p == kMostPart ? warp_fold4(x, Larger{}) : warp_fold4(x, Add{});
        if (at.lane < 4) to[p * kHeads + 4 * quad + at.lane] = folded;
      }
    __syncthreads();
    float value = 0;
    if (at.lane < kParts * kHeads) {
      const bool most = kAsks && at.lane >= kMostPart * kHeads;
      for (std::uint32_t warp = 0; warp < at.warps; ++warp) {
        const float other = of_warps[warp][at.lane];
        value = most ? fmaxf(value, other) : value + other;
      }
    }
    return value;
  }
};

}  // namespace kvlab::kernels
