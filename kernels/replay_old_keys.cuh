// Squeezed positions: exponentials of tokens that have lost a younger one, whose distance to the
// query is the cache's own.
//
// Only that distance counts: the query stays as it was before RoPE and the key turns back by it. As
// long as only younger tokens leave, the distance stays the same from query to query: so a key is
// turned once for some queries ahead, and again only when an older token has left.
//
// Products are TF32 on tensor cores, of keys and queries in two parts each (22 bits), 16 keys at a
// time. Bytes: a key, and its turn from two small tables, for each time that it is turned.
#pragma once

#include "kernels/device/load.cuh"
#include "kernels/replay_block.cuh"

namespace kvlab::kernels {

/// c[16 x 8] += a[16 x 8] * b[8 x 8] in TF32. Lane l holds, with g = l / 4 and t = l % 4: of a rows
/// g, g + 8, g, g + 8 at columns t, t, t + 4, t + 4; of b rows t and t + 4 at column g; of c rows
/// g, g, g + 8, g + 8 at columns 2t and 2t + 1.
__device__ inline void multiply_add_tf32(float (&c)[4], const float (&a)[4], float b0, float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
        "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

/// Sixteen slots whose keys a warp turns; fewer repeat the last.
template <int kQuads>
class OldKeys {
 public:
  /// A key and how far it is behind the query.
  struct Key {
    std::uint32_t slot, position, distance;
  };

  /// `count` queries of the block from `first` on.
  __device__ OldKeys(const ReplayPlace& at, int first, int count)
      : at_(at), first_(first), count_(count) {}

  /// Lane l has keys l / 4 and l / 4 + 8. Writes their exponentials; `wanted`: which of the two.
  __device__ void compute(const Key (&keys)[2], const bool (&wanted)[2]) const {
    const ReplayShape& shape = at_.args.shape;
    const int granules = shape.pairs() / kReplayGranule;
    Sums sums{};
    Raw ahead[2] = {fetch(keys[0], 0), fetch(keys[1], 0)};
#pragma unroll 1
    for (int granule = 0; granule < granules; ++granule) {
      const Raw raw[2] = {ahead[0], ahead[1]};
      if (granule + 1 < granules)
        ahead[0] = fetch(keys[0], granule + 1), ahead[1] = fetch(keys[1], granule + 1);
      add(sums, keys, raw, granule);
    }
#pragma unroll
    for (int n = 0; n < kReplayAhead; ++n)
      if (n < count_)
#pragma unroll
        for (int quad = 0; quad < kQuads; ++quad)
          store(sums.of[n][quad], keys, wanted, first_ + n, quad);
  }

 private:
  struct Sums {
    float of[kReplayAhead][kQuads][4];
  };
  /// Two pairs of both keys: the first's and the second's low half, then their high halves.
  struct Turned {
    float kept[2][4], left[2][4];  ///< in TF32, and what that leaves
  };
  /// Four pairs of a key before RoPE.
  struct Raw {
    float4 low, high;
  };

  /// The products of 16 pairs, summed apart: tensor cores cut off what a sum cannot hold.
  __device__ void add(Sums& sums, const Key (&keys)[2], const Raw (&raw)[2], int granule) const {
    const std::int64_t of_quad = std::int64_t{at_.args.shape.pairs()} / 8 * kWarpSize;
    const float4* const fragments = at_.args.rows.fragments + at_.row(first_) * kQuads * of_quad +
                                    granule * 2 * kWarpSize + at_.lane;
    Sums own{};
#pragma unroll
    for (int couple = 0; couple < 2; ++couple) {
      Turned turned;
#pragma unroll
      for (int key = 0; key < 2; ++key)
        turn(turned, raw[key], keys[key].distance, key, granule, couple);
#pragma unroll
      for (int n = 0; n < kReplayAhead; ++n)
        if (n < count_)
#pragma unroll
          for (int quad = 0; quad < kQuads; ++quad) {
            const float4 b = fragments[(n * kQuads + quad) * of_quad + couple * kWarpSize];
            float(&c)[4] = own.of[n][quad];
            multiply_add_tf32(c, turned.left[0], b.x, b.y);
            multiply_add_tf32(c, turned.left[1], b.z, b.w);
            multiply_add_tf32(c, turned.kept[0], b.x, b.y);
            multiply_add_tf32(c, turned.kept[1], b.z, b.w);
          }
    }
#pragma unroll
    for (int n = 0; n < kReplayAhead; ++n)
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums.of[n][quad][i] += own.of[n][quad][i];
  }

  /// Of lane l from pair 4 (l % 4) of the granule on.
  __device__ int first_pair(int granule) const {
    return granule * kReplayGranule + 4 * static_cast<int>(at_.lane % 4);
  }
  __device__ Raw fetch(const Key& key, int granule) const {
    const ReplayTensors& tensors = at_.args.tensors;
    const int pairs = at_.args.shape.pairs();
    const std::int64_t at =
        (std::int64_t{at_.unit} * at_.args.shape.tokens + key.position) * 2 * pairs +
        first_pair(granule);
    return {load4(tensors.paired_keys, tensors.type, at),
            load4(tensors.paired_keys, tensors.type, at + pairs)};
  }

  /// Two of the pairs turned back by the distance.
  __device__ void turn(Turned& turned, const Raw& raw, std::uint32_t distance, int key, int granule,
                       int couple) const {
    const ReplayTensors& tensors = at_.args.tensors;
    const std::uint32_t pairs = at_.args.shape.pairs(), first = first_pair(granule) + 2 * couple;
    const float4 a = *reinterpret_cast<const float4*>(tensors.coarse +
                                                      ((distance >> 6) * pairs + first)),
                 b = *reinterpret_cast<const float4*>(tensors.fine +
                                                      ((distance & 63) * pairs + first));
    const float cosines[2] = {fmaf(a.x, b.x, -(a.y * b.y)), fmaf(a.z, b.z, -(a.w * b.w))},
                sines[2] = {fmaf(a.x, b.y, a.y * b.x), fmaf(a.z, b.w, a.w * b.z)};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float x = component(raw.low, 2 * couple + i), y = component(raw.high, 2 * couple + i);
      put(turned, i, key, fmaf(x, cosines[i], y * sines[i]));
      put(turned, i, key + 2, fmaf(y, cosines[i], -(x * sines[i])));
    }
  }
  __device__ static void put(Turned& turned, int pair, int at, float x) {
    const float kept = __uint_as_float((__float_as_uint(x) + 0x1000u) & 0xffffe000u);
    turned.kept[pair][at] = kept;
    turned.left[pair][at] = x - kept;
  }

  /// Columns c and c + 4 are two parts of head c. Of four lanes two take the first key, two the
  /// second, two heads each.
  __device__ void store(const float (&sums)[4], const Key (&keys)[2], const bool (&wanted)[2],
                        int i, int quad) const {
    float products[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) products[n] = sums[n] + __shfl_xor_sync(~0u, sums[n], 2);
    const bool second = at_.lane & 2, right = at_.lane & 1;
    const float scale = at_.args.shape.softmax_scale;
    const float4 most = at_.args.rows.most[at_.row(i) * kQuads + quad];
    const int heads = at_.args.shape.group - 4 * quad - (right ? 2 : 0);
    const float a = (second ? products[2] : products[0]) * scale - (right ? most.z : most.x),
                b = (second ? products[3] : products[1]) * scale - (right ? most.w : most.y);
    if (!(second ? wanted[1] : wanted[0])) return;
    float4* const to =
        at_.own(i) + quad * at_.args.caches.unit_slots + (second ? keys[1].slot : keys[0].slot);
    reinterpret_cast<float2*>(to)[right ? 1 : 0] = {heads > 0 ? expf(a) : 0.0f,
                                                    heads > 1 ? expf(b) : 0.0f};
  }

  const ReplayPlace& at_;
  const int first_, count_;
};

/// The exponentials of the warp's old slots for query i of the block: those that are not there yet,
/// and with `ahead` for the queries after it too, up to the end of their run of kReplayAhead.
template <int kQuads, class Cache>
__device__ void take_old_keys(const ReplayPlace& at, ReplayShared& shared, Cache& cache,
                              std::uint32_t visible, int i, bool ahead) {
  const std::uint32_t query = at.args.rows.first + i;
  const int end = ahead ? min((i / kReplayAhead + 1) * kReplayAhead, at.args.rows.count) : i + 1;
  const OldKeys<kQuads> keys(at, i, end - i);
  std::uint32_t* const listed = shared.listed[at.warp];
  std::uint32_t pending = 0;
  const auto stamp_of = [&](std::uint32_t slot) {
    return (query - cache.place(slot)) * (kMostReplayQueries / kReplayAhead) +
           static_cast<std::uint32_t>(i / kReplayAhead);
  };
  const auto compute = [&](const std::uint32_t* list, std::uint32_t count) {
    typename OldKeys<kQuads>::Key two[2];
    bool wanted[2];
#pragma unroll
    for (std::uint32_t n = 0; n < 2; ++n) {
      const std::uint32_t which = at.lane / 4 + 8 * n;
      wanted[n] = which < count;
      const std::uint32_t slot = list[min(which, count - 1)];
      two[n] = {slot, cache.position(slot), query - cache.place(slot)};
    }
    keys.compute(two, wanted);
    if (ahead && at.lane < count) cache.stamp(list[at.lane]) = stamp_of(list[at.lane]);
  };
  for (std::uint32_t first = at.warp * kWarpSize;; first += at.threads) {
    const bool more = first < visible;
    if (more) {
      const std::uint32_t slot = first + at.lane;
      const bool own = slot < visible && cache.is_old(slot) && cache.stamp(slot) != stamp_of(slot);
      const std::uint32_t mask = __ballot_sync(~0u, own);
      if (own) listed[pending + __popc(mask & ((1u << at.lane) - 1))] = slot;
      pending += __popc(mask);
    }
    __syncwarp();
    while (pending >= 16 || (!more && pending > 0)) {
      const std::uint32_t count = min(pending, 16u);
      pending -= count;
      compute(listed + pending, count);
    }
    __syncwarp();
    if (!more) break;
  }
}

}  // namespace kvlab::kernels
