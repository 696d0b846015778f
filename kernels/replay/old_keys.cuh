// Computes exponentials of old keys. An old key has a cache position and is older than an evicted
// token, so its distance to the query differs between caches.
//
// Products depend only on the distance between query and key. So the query stays unrotated, and the
// key is rotated back by the distance. As long as only younger tokens are evicted, the distance
// stays the same from query to query. So a key is rotated once per query group, and again only
// after an older token was evicted. The keys to rotate are listed, and the list is split evenly
// over the warps of a thread block.
//
// Products run on tensor cores in float16, 16 keys at a time. Keys and queries are split into two
// parts each (22 bits). Memory traffic for 16 keys: from the L2 cache, the keys (2 elements per
// pair) and half of their rope tables; from shared memory, the other half of the tables, and 4
// bytes per element of all queries.
#pragma once

#include "kernels/device/half_parts.cuh"
#include "kernels/replay/block.cuh"

namespace kvlab::kernels {

/// The key of an old token, for those queries of a query group that have the same distance to it.
struct OldItem {
  std::uint32_t slot;
  /// 24 bits: distance. 4 bits each: the first of those queries, and their end (exclusive), as
  /// indices in the query group.
  std::uint32_t packed;

  __device__ static OldItem make(std::uint32_t slot, std::uint32_t distance, std::uint32_t first,
                                 std::uint32_t end) {
    return {slot, distance << 8 | first << 4 | end};
  }
  __device__ std::uint32_t distance() const { return packed >> 8; }
  __device__ int first() const { return static_cast<int>(packed >> 4 & 15); }
  __device__ int end() const { return static_cast<int>(packed & 15); }
};
inline constexpr int kMaxOldDistance = 1 << 24;  ///< exclusive

/// The old keys to rotate, and the position of each slot's token.
struct OldList {
  const OldItem* items;
  std::uint32_t count;
  const std::uint32_t* positions;  ///< by slot
};

/// The layout of the data in shared memory that the product with old keys needs. In this order: the
/// fragments [pairs / 8, tile, lane] of one query group (see ReplayCachePositionRows), a float2 for
/// each column of the query group (its scale and its largest logit), and the rope table of
/// positions 0 to 63.
struct OldKeyLayout {
  int fragments, columns, rope, rope_stride;  ///< in units of 16 bytes

  /// The padding between angles of neighbouring positions avoids bank conflicts.
  constexpr explicit OldKeyLayout(const ReplayShape& shape)
      : fragments(shape.pairs() / 8 * (kReplayAhead * shape.head_groups() / 2) * kWarpSize),
        columns(kReplayAhead * shape.head_groups() * 2),
        rope(64 * (shape.pairs() / 2 + 4)),
        rope_stride(shape.pairs() / 2 + 4) {}
  constexpr std::size_t bytes() const {
    return 16 * static_cast<std::size_t>(fragments + columns + rope);
  }
};

class OldKeyStage {
 public:
  /// `stage`: memory with the layout OldKeyLayout. The stage may be used after the next barrier.
  __device__ OldKeyStage(const ReplayCachePositionArgs& args, int task, std::byte* stage)
      : args_(args), task_(task), stage_(reinterpret_cast<uint4*>(stage)) {
    const int head_groups = args.shape.pairs() / 2;
    const OldKeyLayout parts(args.shape);
    const auto* const from = reinterpret_cast<const uint4*>(args.tensors.fine);
    uint4* const to = stage_ + parts.fragments + parts.columns;
    // A uint4 holds two pairs. Each of four lanes reads two uint4 of a granule (16 pairs). In
    // global memory the two uint4 of a lane are neighbours. In this stage, the first uint4 of all
    // four lanes come before the second ones.
    for (int n = static_cast<int>(threadIdx.x); n < 64 * head_groups;
         n += static_cast<int>(blockDim.x)) {
      const int position_in_cache = n / head_groups, at = n % head_groups;
      to[position_in_cache * parts.rope_stride + at / 8 * 8 + at % 2 * 4 + at % 8 / 2] = from[n];
    }
  }

  /// Loads the queries of one query group of the block. Called by the whole thread block, between
  /// barriers.
  __device__ void take(int query_group) {
    if (query_group == query_group_) return;
    query_group_ = query_group;
    const ReplayShape& shape = args_.shape;
    const OldKeyLayout parts(shape);
    const int heads = 4 * shape.head_groups(), thread = static_cast<int>(threadIdx.x),
              threads = static_cast<int>(blockDim.x);
    const std::int64_t query_groups = args_.rows.block / kReplayAhead,
                       group_index = task_ * query_groups + query_group;
    const uint4* const from = args_.cache_positions.fragments + group_index * parts.fragments;
    for (int n = thread; n < parts.fragments; n += threads) stage_[n] = from[n];
    const std::int64_t first_column = group_index * kReplayAhead * heads;
    const float* const scales =
        reinterpret_cast<const float*>(args_.cache_positions.scales) + first_column;
    const float* const max_logits =
        reinterpret_cast<const float*>(args_.cache_positions.max_logits) + first_column;
    // Padding heads get exponential 0.
    for (int n = thread; n < kReplayAhead * heads; n += threads)
      reinterpret_cast<float2*>(stage_ + parts.fragments)[n] = {
          scales[n], n % heads < shape.group ? max_logits[n] : __int_as_float(0x7f800000)};
  }
  __device__ const uint4* memory() const { return stage_; }

 private:
  const ReplayCachePositionArgs& args_;
  const int task_;
  uint4* const stage_;
  int query_group_ = -1;
};

/// Four pairs of a key before RoPE, in their storage format. They are converted only when they are
/// used, because an earlier conversion would wait for the loads.
template <class T>
struct FourPairs {
  uint4 bits;
  __device__ explicit FourPairs(const uint4* at) : bits(__ldg(at)) {}
  /// The first elements of two of the four pairs. high() returns their second elements.
  __device__ float2 low(int couple) const { return unpack<T>(couple == 0 ? bits.x : bits.y); }
  __device__ float2 high(int couple) const { return unpack<T>(couple == 0 ? bits.z : bits.w); }
};
template <>
struct FourPairs<float> {
  float4 lows, highs;
  __device__ explicit FourPairs(const uint4* at)
      : lows(__ldg(reinterpret_cast<const float4*>(at))),
        highs(__ldg(reinterpret_cast<const float4*>(at + 1))) {}
  __device__ float2 low(int couple) const { return pair_of(lows, couple); }
  __device__ float2 high(int couple) const { return pair_of(highs, couple); }

 private:
  __device__ static float2 pair_of(const float4& four, int couple) {
    return couple == 0 ? float2{four.x, four.y} : float2{four.z, four.w};
  }
};

/// A warp that processes sixteen listed keys at a time. T: type of keys.
template <int kHeadGroups, class T>
class OldKeys {
  static constexpr int kHeads = 4 * kHeadGroups;
  static constexpr int kTiles =
      kReplayAhead * kHeads / 8;                 ///< tiles of 8 columns in a query group; a column
                                                 ///< is a query and one of its heads
  static constexpr int kAtOnce = 4;              ///< tiles whose products are interleaved
  static constexpr int kOfLane = sizeof(T) / 2;  ///< number of uint4 that hold four pairs

 public:
  __device__ OldKeys(const ReplayCachePositionArgs& args, int task, std::int64_t first_slot,
                     const uint4* stage, const OldList& old)
      : old_(old),
        coarse_(reinterpret_cast<const float4*>(args.tensors.coarse)),
        lane_(static_cast<int>(threadIdx.x) % kWarpSize),
        granules_(args.shape.pairs() / kReplayGranule) {
    const OldKeyLayout parts(args.shape);
    const std::int64_t slots = args.slots.task_stride;
    const int t = lane_ % 4;
    fragments_ = stage + lane_;
    columns_ = reinterpret_cast<const float4*>(stage + parts.fragments) + t;
    fine_ = reinterpret_cast<const float4*>(stage + parts.fragments + parts.columns) + t;
    fine_stride_ = parts.rope_stride;
    keys_ = static_cast<const uint4*>(args.paired_keys) +
            std::int64_t{task} * args.shape.tokens * key_stride() + kOfLane * t;
    scales_ = args.key_scales + std::int64_t{task} * args.shape.tokens;
    coarse_ += 2 * t;
    direct_ = reinterpret_cast<float2*>(args.slots.direct +
                                        std::int64_t{task} * kReplayAhead * kHeadGroups * slots +
                                        first_slot) +
              t % 2;
    head_group_stride_ = 2 * slots;
  }

  __device__ void take() {
    const std::uint32_t round_tokens = blockDim.x / kWarpSize * 16;
    std::uint32_t batch = threadIdx.x / kWarpSize * 16;
    if (batch >= old_.count) return;
    Two keys = load_pair(batch);
    FourPairs<T> ahead[2] = {FourPairs<T>(keys.key[0]), FourPairs<T>(keys.key[1])};
    while (true) {
      const Two next = load_pair(batch + round_tokens);
      Sums sums{};
      Granule at = first_granule(keys);
#pragma unroll 1
      for (int granule = 1; granule <= granules_; ++granule) {
        const FourPairs<T> now[2] = {ahead[0], ahead[1]};
#pragma unroll
        for (int n = 0; n < 2; ++n)
          ahead[n] = FourPairs<T>(granule == granules_ ? next.key[n] : at.key[n]);
        add(sums, now, at);
        at.advance();
      }
      store(sums, keys);
      batch += round_tokens;
      if (batch >= old_.count) return;
      keys = next;
    }
  }

 private:
  struct Sums {
    float tiles[kTiles][4];
  };
  /// The two keys of lane l: keys l / 4 and l / 4 + 8 of a batch of 16 listed keys.
  struct Two {
    OldItem item[2];
    const uint4* key[2];
    float scale[2];
  };
  /// The addresses of the data of one granule (16 pairs): the queries and the two keys' angles.
  /// `key` points to the next granule of the two keys, because keys are loaded one granule ahead.
  struct Granule {
    const uint4 *key[2], *queries;
    const float4 *coarse[2], *fine[2];

    __device__ void advance() {
#pragma unroll
      for (int n = 0; n < 2; ++n) key[n] += 4 * kOfLane, coarse[n] += 8, fine[n] += 8;
      queries += 2 * kTiles * kWarpSize;
    }
  };
  /// Two pairs of two rotated keys, as operands of a product: `kept` are the numbers rounded to
  /// float16, `left` the rounding errors. Elements 0 and 1 are the first elements of the pairs (of
  /// key 0 and of key 1), elements 2 and 3 their second elements.
  struct Rotated {
    std::uint32_t kept[4], left[4];
  };

  /// For a batch beyond the last item, returns a pair of keys that no query uses.
  __device__ Two load_pair(std::uint32_t batch) const {
    Two two;
#pragma unroll
    for (std::uint32_t n = 0; n < 2; ++n) {
      const std::uint32_t which = batch + static_cast<std::uint32_t>(lane_) / 4 + 8 * n;
      two.item[n] = old_.items[min(which, old_.count - 1)];
      const std::uint32_t position = old_.positions[two.item[n].slot];
      two.key[n] = keys_ + std::size_t{position} * key_stride();
      two.scale[n] = __ldg(scales_ + position);
      if (which >= old_.count) two.item[n].packed &= ~0xffu;
    }
    return two;
  }
  __device__ std::uint32_t key_stride() const {
    return static_cast<std::uint32_t>(granules_ * 4 * kOfLane);
  }
  __device__ Granule first_granule(const Two& keys) const {
    Granule at;
    at.queries = fragments_;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const std::uint32_t distance = keys.item[n].distance();
      at.key[n] = keys.key[n] + 4 * kOfLane;
      at.coarse[n] = coarse_ + (distance >> 6) * static_cast<std::uint32_t>(granules_ * 8);
      at.fine[n] = fine_ + (distance & 63) * static_cast<std::uint32_t>(fine_stride_);
    }
    return at;
  }

  /// Adds the products of 16 pairs to `sums`. They are first summed in separate accumulators,
  /// because tensor cores truncate the bits that an accumulator cannot hold.
  __device__ static void add(Sums& sums, const FourPairs<T> (&raw)[2], const Granule& at) {
    Sums own{};
#pragma unroll
    for (int couple = 0; couple < 2; ++couple) {
      Rotated rotated;
#pragma unroll
      for (int n = 0; n < 2; ++n)
        rotate(rotated, raw[n], __ldg(at.coarse[n] + couple), at.fine[n][4 * couple], n, couple);
      const uint4* const queries = at.queries + couple * kTiles * kWarpSize;
#pragma unroll
      for (int first = 0; first < kTiles; first += kAtOnce)
        multiply(&own.tiles[first], rotated, queries + first * kWarpSize);
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums.tiles[n][i] += own.tiles[n][i];
  }
  __device__ static void multiply(float (*sums)[4], const Rotated& keys, const uint4* queries) {
    uint4 loaded[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) loaded[n] = queries[n * kWarpSize];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n)
      multiply_add<__half>(sums[n], keys.left, loaded[n].x, loaded[n].y);
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n)
      multiply_add<__half>(sums[n], keys.kept, loaded[n].z, loaded[n].w);
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n)
      multiply_add<__half>(sums[n], keys.kept, loaded[n].x, loaded[n].y);
  }

  /// Rotates two of the pairs back by the sum of two angles, which is the angle of the distance.
  /// `a` and `b` hold the cosines and sines of the two angles.
  __device__ static void rotate(Rotated& rotated, const FourPairs<T>& raw, const float4& a,
                                const float4& b, int key, int couple) {
    const float cosines[2] = {fmaf(a.x, b.x, -(a.y * b.y)), fmaf(a.z, b.z, -(a.w * b.w))},
                sines[2] = {fmaf(a.x, b.y, a.y * b.x), fmaf(a.z, b.w, a.w * b.z)};
    const float2 x = raw.low(couple), y = raw.high(couple);
    const HalfParts low = HalfParts::split(fmaf(x.x, cosines[0], y.x * sines[0]),
                                           fmaf(x.y, cosines[1], y.y * sines[1])),
                    high = HalfParts::split(fmaf(y.x, cosines[0], -(x.x * sines[0])),
                                            fmaf(y.y, cosines[1], -(x.y * sines[1])));
    rotated.kept[key] = low.kept, rotated.left[key] = low.left;
    rotated.kept[key + 2] = high.kept, rotated.left[key + 2] = high.left;
  }

  /// Stores the exponentials. Lane l holds columns 2 (l % 4) and 2 (l % 4) + 1 of each tile, which
  /// are two heads of one query.
  __device__ void store(const Sums& sums, const Two& keys) const {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const float4 column = columns_[4 * tile];
      const int query = (8 * tile + 2 * (lane_ % 4)) / kHeads,
                head_group = (8 * tile + 2 * (lane_ % 4)) % kHeads / 4;
      float2* const to = direct_ + (query * kHeadGroups + head_group) * head_group_stride_;
#pragma unroll
      for (int n = 0; n < 2; ++n)
        if (keys.item[n].first() <= query && query < keys.item[n].end())
          to[2 * std::size_t{keys.item[n].slot}] = {
              exponential(sums.tiles[tile][2 * n] * keys.scale[n], column.x, column.y),
              exponential(sums.tiles[tile][2 * n + 1] * keys.scale[n], column.z, column.w)};
    }
  }
  /// Returns e^(x * scale - max_logit). The relative error is about 2^-22 + 2^-24 * |x * scale -
  /// max_logit|.
  __device__ static float exponential(float x, float scale, float max_logit) {
    float e;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(fmaf(x, scale, -max_logit) * 1.44269504f));
    return e;
  }

  const OldList old_;
  /// [token, pairs / 4]. This and the next pointers already include this lane's offset.
  const uint4* keys_;
  const float* scales_;     // [token]
  const float4* coarse_;    // [distance / 64, pairs / 2]
  const float4* fine_;      // [distance % 64, fine_stride_]
  const uint4* fragments_;  // [pairs / 8, tile, lane]
  const float4* columns_;   // [tile, 4]
  float2* direct_;          // [query of the query group, head group, slot, 2]
  std::int64_t head_group_stride_;
  int fine_stride_, lane_, granules_;
};

/// Computes the exponentials of the listed items for the query group whose data `stage` holds.
/// Called by the whole thread block, between barriers. An item writes only the exponentials of its
/// own queries, so several items may have the same slot and different queries. It is fastest if
/// items of similar distance follow one another. Not inlined, because it would use registers that
/// its caller needs. T: type of keys.
template <int kHeadGroups, class T>
__device__ __noinline__ void take_old_keys(const ReplayCachePositionArgs& args, int task,
                                           std::int64_t first_slot, const uint4* stage,
                                           const OldList old) {
  OldKeys<kHeadGroups, T>(args, task, first_slot, stage, old).take();
}

}  // namespace kvlab::kernels
