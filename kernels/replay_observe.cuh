// What a query shows: from a token's exponentials to what its policy observes.
#pragma once

#include "kernels/device/mass_sum.hpp"
#include "kernels/replay_block.cuh"

namespace kvlab::kernels {

/// The e from which on a head requests a token, of a row with this sum and this largest e.
__device__ inline float least_requested(float sum, float most, std::uint32_t threshold16) {
  const float p = request_floor(fixed_mass(1.0f, most * (1 / sum)), threshold16);
  return p < 0 ? 0.0f : p * sum;
}

/// One query's look at the live tokens.
template <class P, int kQuads>
struct QueryLook {
  static constexpr bool kAsks = P::kInfo.needs == Needs::requests;
  Quads<kQuads> over;   ///< 1 / sum; 0 where there is no head
  Quads<kQuads> least;  ///< e from which on a head requests a token; infinite where there is none
  float weight;
  std::uint32_t query;

  /// `sum`, `most`: of lane l for head l.
  __device__ QueryLook(float sum, float most, const ReplayPlace& at, float of_age,
                       std::uint32_t of_query)
      : weight(of_age), query(of_query) {
    const ReplayShape& shape = at.args.shape;
    const bool is_head = at.lane < static_cast<unsigned>(shape.group);
    if constexpr (kAsks) {
      float bound = __int_as_float(0x7f800000);
      if (is_head) bound = least_requested(sum, most, shape.threshold16);
      least = quads_of_lanes<kQuads>(bound);
    } else {
      over = quads_of_lanes<kQuads>(is_head ? 1 / sum : 0.0f);
    }
  }

  __device__ Observation seen(const Quads<kQuads>& e) const {
    Observation seen{.queries = 1};
    if constexpr (kAsks) {
      seen.requests = asked(e) ? 1 : 0;
      seen.last_request = query;
    } else {
      seen.mass = mass(e);
    }
    return seen;
  }

 private:
  __device__ bool asked(const Quads<kQuads>& e) const {
    bool any = false;
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      const float4 x = e.quad[quad], bound = least.quad[quad];
      any |= x.x >= bound.x || x.y >= bound.y || x.z >= bound.z || x.w >= bound.w;
    }
    return any;
  }
  __device__ std::uint64_t mass(const Quads<kQuads>& e) const {
    MassSum sum;
    std::uint64_t weighted = 0;
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      const float4 x = e.quad[quad], y = over.quad[quad];
      const float p[] = {x.x * y.x, x.y * y.y, x.z * y.z, x.w * y.w};
#pragma unroll
      for (int head = 0; head < 4; ++head) {
        if constexpr (P::kInfo.weighted)
          weighted += fixed_mass(weight, p[head]);
        else
          sum.add(p[head]);
      }
    }
    return P::kInfo.weighted ? weighted : sum.total(4 * kQuads);
  }
};

}  // namespace kvlab::kernels
