// Squeezed positions: exponentials of tokens that have lost a younger one, whose distance to the
// query is the cache's own.
//
// Only that distance counts: the query stays as it was before RoPE and the key turns back by it. As
// long as only younger tokens leave, the distance stays the same from query to query: so a key is
// turned once for a run of queries, and again only when an older token has left. The keys that are
// to be turned are listed by the whole block, so that each warp has as many of them.
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

/// Of ReplayRows::fragments, how many a run of queries has.
constexpr int fragments_of_run(const ReplayShape& shape) {
  return shape.pairs() / 4 * (kReplayAhead * shape.quads() / 2) * kWarpSize;
}
/// Bytes of shared memory for those: the squeezed caches of a multiprocessor read them again and
/// again, more than its share of the L2 cache gives.
constexpr std::size_t room_of_fragments(const ReplayShape& shape) {
  return sizeof(float4) * static_cast<std::size_t>(fragments_of_run(shape));
}
/// Bytes that an OldKeyStage has in a walk.
constexpr std::size_t room_of_old_keys(const ReplayArgs& args) {
  return args.squeezed && args.staged ? room_of_fragments(args.shape) : 0;
}

/// What the old keys of a cache are multiplied with, in shared memory where it fits.
class OldKeyStage {
 public:
  /// `room`: room_of_old_keys() bytes.
  __device__ OldKeyStage(const ReplayArgs& args, int unit, std::byte* room)
      : args_(args),
        unit_(unit),
        room_(room_of_old_keys(args) > 0 ? reinterpret_cast<float4*>(room) : nullptr) {}

  /// Takes the queries of a run (the block's from run * kReplayAhead on): by the whole block,
  /// between barriers.
  __device__ void take(int run) {
    if (run == run_) return;
    const auto size = static_cast<std::uint32_t>(fragments_of_run(args_.shape));
    const std::int64_t of_unit = args_.rows.block / kReplayAhead;
    const float4* const from = args_.rows.fragments + (unit_ * of_unit + run) * size;
    run_ = run;
    fragments_ = room_ ? room_ : from;
    if (room_)
      for (std::uint32_t n = threadIdx.x; n < size; n += blockDim.x) room_[n] = from[n];
  }
  __device__ int run() const { return run_; }
  __device__ const float4* fragments() const { return fragments_; }

 private:
  const ReplayArgs& args_;
  const int unit_;
  float4* const room_;
  const float4* fragments_ = nullptr;  ///< of the run
  int run_ = -1;
};

/// Sixteen slots whose keys a warp turns; fewer repeat the last. Bits: what four elements of a key
/// take.
template <int kQuads, class Bits>
class OldKeys {
  static constexpr int kHeads = 4 * kQuads;
  static constexpr int kTiles = kReplayAhead * kHeads / 8;  ///< of a run's columns: query, head

 public:
  /// A key and how far it is behind the queries [first, end) of the run; none: first >= end.
  struct Key {
    std::uint32_t slot, position, distance;
    int first, end;
  };

  /// For the run of queries that the stage has.
  __device__ OldKeys(const ReplayArgs& args, int unit, std::int64_t first_slot,
                     const OldKeyStage& stage)
      : keys_(static_cast<const Bits*>(args.tensors.paired_keys)),
        coarse_(reinterpret_cast<const float4*>(args.tensors.coarse)),
        fine_(reinterpret_cast<const float4*>(args.tensors.fine)),
        type_(args.tensors.type),
        lane_(static_cast<int>(threadIdx.x) % kWarpSize),
        pairs_(args.shape.pairs()),
        group_(args.shape.group),
        scale_(args.shape.softmax_scale) {
    const std::int64_t row = std::int64_t{unit} * args.rows.block + stage.run() * kReplayAhead,
                       slots = args.caches.unit_slots;
    fragments_ = stage.fragments() + lane_;
    keys_ += std::int64_t{unit} * args.shape.tokens * 2 * pairs_ / 4 + lane_ % 4;
    coarse_ += 2 * (lane_ % 4);
    fine_ += 2 * (lane_ % 4);
    most_ = reinterpret_cast<const float*>(args.rows.most + row * kQuads);
    quad_stride_ = 4 * slots;
    own_ = reinterpret_cast<float*>(
        args.caches.own + std::int64_t{unit} * kReplayAhead * kQuads * slots + first_slot);
  }

  /// Lane l has keys l / 4 and l / 4 + 8. Writes their exponentials for their queries.
  __device__ void compute(const Key (&keys)[2]) {
    first_ = __reduce_min_sync(~0u, min(keys[0].first, keys[1].first));
    end_ = __reduce_max_sync(~0u, max(keys[0].end, keys[1].end));
    const int granules = pairs_ / kReplayGranule;
    Sums sums{};
    Source of[2] = {source_of(keys[0]), source_of(keys[1])};
    Raw ahead[2] = {fetch(of[0], 0), fetch(of[1], 0)};
#pragma unroll 1
    for (int granule = 0; granule < granules; ++granule) {
      const Raw raw[2] = {ahead[0], ahead[1]};
      const int next = min(granule + 1, granules - 1);
      ahead[0] = fetch(of[0], next), ahead[1] = fetch(of[1], next);
      add(sums, of, raw, granule);
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
      if (is_wanted(n)) store(sums.of[n], keys, n);
  }

 private:
  struct Sums {
    float of[kTiles][4];
  };
  /// Two pairs of both keys: the first's and the second's low half, then their high halves.
  struct Turned {
    float kept[2][4], left[2][4];  ///< in TF32, and what that leaves
  };
  /// Four pairs of a key before RoPE, as they lie in memory: conversion would wait for them.
  struct Raw {
    Bits low, high;
  };

  /// Where a key and its turn lie, from this lane's first pair on.
  struct Source {
    const Bits* key;
    const float4 *coarse, *fine;
  };
  __device__ Source source_of(const Key& key) const {
    return {keys_ + std::size_t{key.position} * (pairs_ / 2),
            coarse_ + (key.distance >> 6) * (pairs_ / 2),
            fine_ + (key.distance & 63) * (pairs_ / 2)};
  }
  __device__ Raw fetch(const Source& of, int granule) const {
    const Bits* const at = of.key + 4 * granule;
    return {__ldg(at), __ldg(at + pairs_ / 4)};
  }

  __device__ bool is_wanted(int tile) const {
    return tile >= first_ * kHeads / 8 && tile * 8 < end_ * kHeads;
  }

  /// The products of 16 pairs, summed apart: tensor cores cut off what a sum cannot hold.
  __device__ void add(Sums& sums, const Source (&of)[2], const Raw (&raw)[2], int granule) const {
    Sums own{};
#pragma unroll
    for (int couple = 0; couple < 2; ++couple) {
      Turned turned;
#pragma unroll
      for (int key = 0; key < 2; ++key)
        turn(turned, raw[key], __ldg(of[key].coarse + 8 * granule + couple),
             __ldg(of[key].fine + 8 * granule + couple), key, couple);
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const float4* const at =
            fragments_ + (4 * granule + 2 * couple + pair) * kTiles * kWarpSize;
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
          if (is_wanted(n)) {
            const float4 b = at[n * kWarpSize];
            multiply_add_tf32(own.of[n], turned.left[pair], b.x, b.y);
            multiply_add_tf32(own.of[n], turned.kept[pair], b.z, b.w);
            multiply_add_tf32(own.of[n], turned.kept[pair], b.x, b.y);
          }
      }
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums.of[n][i] += own.of[n][i];
  }

  /// Two of the pairs turned back: `a` and `b` are the turns of parts of the distance.
  __device__ void turn(Turned& turned, const Raw& raw, const float4& a, const float4& b, int key,
                       int couple) const {
    const float cosines[2] = {fmaf(a.x, b.x, -(a.y * b.y)), fmaf(a.z, b.z, -(a.w * b.w))},
                sines[2] = {fmaf(a.x, b.y, a.y * b.x), fmaf(a.z, b.w, a.w * b.z)};
    const float2 low = two_of(raw.low, type_, couple), high = two_of(raw.high, type_, couple);
    const float xs[2] = {low.x, low.y}, ys[2] = {high.x, high.y};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      put(turned, i, key, fmaf(xs[i], cosines[i], ys[i] * sines[i]));
      put(turned, i, key + 2, fmaf(ys[i], cosines[i], -(xs[i] * sines[i])));
    }
  }
  __device__ static void put(Turned& turned, int pair, int at, float x) {
    const float kept = __uint_as_float((__float_as_uint(x) + 0x1000u) & 0xffffe000u);
    turned.kept[pair][at] = kept;
    turned.left[pair][at] = x - kept;
  }

  /// Of lane l columns 2 (l % 4) and the next: two heads of one query.
  __device__ void store(const float (&sums)[4], const Key (&keys)[2], int tile) const {
    const int column = 8 * tile + 2 * (lane_ % 4), query = column / kHeads, head = column % kHeads;
    const float2 most = *reinterpret_cast<const float2*>(most_ + column);
    float* const to = own_ + (query * kQuads + head / 4) * quad_stride_ + head % 4;
#pragma unroll
    for (int n = 0; n < 2; ++n)
      if (keys[n].first <= query && query < keys[n].end)
        *reinterpret_cast<float2*>(to + 4 * std::size_t{keys[n].slot}) = {
            head < group_ ? expf(sums[2 * n] * scale_ - most.x) : 0.0f,
            head + 1 < group_ ? expf(sums[2 * n + 1] * scale_ - most.y) : 0.0f};
  }

  // From this lane's first on:
  const Bits* keys_;              // [token, 2, pairs / 4]
  const float4 *coarse_, *fine_;  // [place, pairs / 2]
  const float4* fragments_;       // [pairs / 4, tile, lane]
  const float* most_;             // [query of the run, head of quads]
  float* own_;                    // [query of the run, quad, slot, 4]
  std::int64_t quad_stride_;
  Type type_;
  int lane_, pairs_, group_;
  float scale_;
  int first_ = 0, end_ = 0;  ///< queries of the run that some key of the batch is for
};

/// The exponentials of the listed items for the stage's run of queries: by the whole block, between
/// barriers. Writes for each item what it is for and nothing else, so that items of a slot may
/// share out its queries. Bits: what four elements of a key take. Apart from its caller, whose
/// registers it would take.
template <int kQuads, class Bits>
__device__ __noinline__ void take_old_keys(const ReplayArgs& args, int unit,
                                           std::int64_t first_slot, const OldKeyStage& stage,
                                           ListedSlots old) {
  OldKeys<kQuads, Bits> keys(args, unit, first_slot, stage);
  const std::uint32_t lane = threadIdx.x % kWarpSize;
  for (std::uint32_t batch = threadIdx.x / kWarpSize * 16; batch < old.count;
       batch += blockDim.x / kWarpSize * 16) {
    typename OldKeys<kQuads, Bits>::Key two[2];
#pragma unroll
    for (std::uint32_t n = 0; n < 2; ++n) {
      const std::uint32_t which = batch + lane / 4 + 8 * n;
      const OldItem item = old.items[min(which, old.count - 1)];
      const bool is = which < old.count;
      two[n] = {item.slot, old.positions[item.slot], item.distance(), is ? item.first() : 8,
                is ? item.end() : 0};
    }
    keys.compute(two);
  }
}

}  // namespace kvlab::kernels
