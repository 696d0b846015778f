// Split-KV decode attention in one launch. Memory traffic: keys and values are read once, 2 *
// head_size elements per live slot. The lower bound of the time is this traffic divided by the read
// bandwidth. The output for the observer, 4 bytes per slot and query head, stays in the L2 cache.
//
// The tiles of all pairs form one row, which the CTAs share evenly for any lengths of the pairs.
// The boundary between two shares may cut a pair in two. A CTA that has all tiles of a pair writes
// the pair's output. If a pair is cut, each of its CTAs stores a part in the workspace, and the
// last CTA to arrive merges the parts in order. So the grid depends only on the capacity and the
// device, and the kernel reads the lengths when it runs. A few pairs with few slots use a separate
// kernel (clustered_attention.cuh).
//
// Internal to the library: pair_attention.cu instantiates the kernels for contiguous slots,
// paged_attention.cu for pages.
#pragma once

#include <algorithm>

#include "kernels/decode/clustered_attention.cuh"
#include "kernels/decode/pair_plan.cuh"
#include "kernels/decode/pair_tiles.cuh"
#include "kernels/device/even_share.cuh"
#include "kernels/device/reduce.cuh"
#include "kernels/device/signal.cuh"
#include "kernels/launch.cuh"

namespace kvlab::kernels {

/// Four dimensions of one query head, after the merge.
using State = SoftmaxState<4>;

/// Stores the softmax for the observer. `largest`: the largest logit of a token. max_and_sum may
/// include a sink logit, which belongs to no token.
__device__ inline void store_softmax(const PairPlan& plan, int pair, int head, float largest,
                                     float2 max_and_sum) {
  if (plan.args.rows.softmax != nullptr)
    plan.args.rows.softmax[pair * kMaxGroup + head] =
        make_float2(largest, rescale(largest, max_and_sum.x) / max_and_sum.y);
}
__device__ inline void store_evicted_end(const PairPlan& plan, int pair, std::uint32_t gone) {
  if (threadIdx.x == 0 && plan.args.rows.gone != nullptr) plan.args.rows.gone[pair] = gone;
}

/// Merges the warps' results for one pair or, if the pair is cut, for the pair's tiles in this CTA.
template <class Warp>
__device__ void write_pair(const PairPlan& plan, const Exchange<Warp::kHeadSize>& exchange,
                           int pair, bool whole, int part) {
  constexpr int kDim = Warp::kHeadSize;
  const int group = plan.args.group;
  for (int i = threadIdx.x; i < group * kDim / 4; i += kThreads) {
    const int head = i / (kDim / 4), dim = i % (kDim / 4) * 4;
    State state;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const WarpPart found = exchange.part(w);
      const float4 out = *reinterpret_cast<const float4*>(found.out + head * kDim + dim);
      state = merge(state,
                    State{found.state[head].x, found.state[head].y, {out.x, out.y, out.z, out.w}});
    }
    const float largest = state.max;
    if (whole && plan.args.sinks != nullptr)
      state = merge(state, State{sink_of(plan.args, pair, head), 1});
    const float4 out = make_float4(state.out[0], state.out[1], state.out[2], state.out[3]);
    const float2 max_and_sum = make_float2(state.max, state.sum);
    if (whole) {
      write_output<typename Warp::Element>(plan, pair * group + head, dim, out, max_and_sum);
      if (dim == 0) store_softmax(plan, pair, head, largest, max_and_sum);
    } else {
      const int row = part * group + head;
      *reinterpret_cast<float4*>(&plan.part_out[row * kDim + dim]) = out;
      if (dim == 0) plan.part_state[row] = max_and_sum;
    }
  }
}

/// The parts of a pair that is cut: one part from each of the CTAs `first` to `last`.
struct PairParts {
  int first, last;
  bool first_is_second;  ///< CTA `first` also had an earlier pair, so its part of this pair is its
                         ///< second part

  __device__ PairParts(const EvenShare& share, int begin, int tiles)
      : first(share.worker_of(begin)),
        last(share.worker_of(begin + tiles - 1)),
        first_is_second(share.begin(first) < begin) {}
  __device__ int count() const { return last - first + 1; }
  /// The row in the workspace of the pair's part `i`.
  __device__ int at(int i) const { return (first + i) * 2 + (i == 0 && first_is_second ? 1 : 0); }
};

/// Computes the weight of each part and the sum over all parts, in a fixed order. Uses one warp for
/// each query head. The warp also stores the head's softmax for the observer.
template <int kDim>
__device__ void weigh_parts(const PairPlan& plan, const PairParts& parts,
                            const Exchange<kDim>& exchange, int pair) {
  constexpr int kMax = kMaxCtas / 32;  // parts per lane
  const int lane = threadIdx.x % 32, count = parts.count(), group = plan.args.group;
  for (int head = threadIdx.x / 32; head < group; head += kWarps) {
    float2 states[kMax];
    const float sink = sink_of(plan.args, pair, head);
    float max = -INFINITY, sum = 0;
#pragma unroll
    for (int k = 0; k < kMax; ++k) {
      const int i = lane + k * 32;
      states[k] = i < count ? __ldcg(&plan.part_state[parts.at(i) * group + head])
                            : make_float2(-INFINITY, 0);
      max = fmaxf(max, states[k].x);
    }
    const float largest = warp_max(max);
    max = fmaxf(largest, sink);
#pragma unroll
    for (int k = 0; k < kMax; ++k) {
      const int i = lane + k * 32;
      const float weight = rescale(states[k].x, max);
      if (i < count) exchange.weights()[i * group + head] = weight;
      sum = fmaf(weight, states[k].y, sum);
    }
    const float2 all = make_float2(max, warp_sum(sum) + rescale(sink, max));
    if (lane != 0) continue;
    exchange.rows()[head] = all;
    store_softmax(plan, pair, head, largest, all);
  }
}

/// Sums the outputs of all parts of a pair. Consecutive threads take consecutive columns (four
/// dimensions of a query head). If there are more threads than columns, the threads form several
/// rows, and row r sums parts r, r + rows, … The first loads are started before the weights are
/// computed.
template <class Warp>
class OutputMerge {
 public:
  __device__ OutputMerge(const PairPlan& plan, const PairParts& parts,
                         const Exchange<Warp::kHeadSize>& exchange)
      : plan_(plan),
        parts_(parts),
        exchange_(exchange),
        columns_(plan.args.group * kChunks),
        rows_(max(kThreads / columns_, 1)),
        row_(rows_ > 1 ? threadIdx.x / columns_ : 0),
        column_(rows_ > 1 ? threadIdx.x % columns_ : threadIdx.x) {
    if (row_ < rows_) fetch(row_);
  }

  /// Call it when the weights have been computed and are visible to all threads.
  __device__ void write(int pair) {
    if (rows_ == 1) {
      for (; column_ < columns_; column_ += kThreads) {
        write_feature(pair, sum());
        if (column_ + kThreads < columns_) fetch(0, column_ + kThreads);
      }
      return;
    }
    float4* const outputs = exchange_.outputs();
    if (row_ < rows_) outputs[threadIdx.x] = sum();
    __syncthreads();
    if (row_ != 0) return;
    float4 all = outputs[column_];
    for (int r = 1; r < rows_; ++r) {
      const float4 other = outputs[r * columns_ + column_];
      all = make_float4(all.x + other.x, all.y + other.y, all.z + other.z, all.w + other.w);
    }
    write_feature(pair, all);
  }

 private:
  static constexpr int kChunks = Warp::kHeadSize / 4;
  static constexpr int kAtOnce = 12;

  __device__ void fetch(int first) { fetch(first, column_); }
  __device__ void fetch(int first, int column) {
    const auto* const out = reinterpret_cast<const float4*>(plan_.part_out);
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int i = first + k * rows_;
      if (i < parts_.count() && column < columns_)
        fetched_[k] = __ldcg(&out[parts_.at(i) * columns_ + column]);
    }
  }
  __device__ float4 sum() {
    const float* const weights = exchange_.weights() + column_ / kChunks;
    float4 all = make_float4(0, 0, 0, 0);
    for (int first = row_; first < parts_.count(); first += kAtOnce * rows_) {
      if (first != row_) fetch(first);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int i = first + k * rows_;
        if (i >= parts_.count()) break;
        const float weight = weights[i * plan_.args.group];
        all.x = fmaf(weight, fetched_[k].x, all.x);
        all.y = fmaf(weight, fetched_[k].y, all.y);
        all.z = fmaf(weight, fetched_[k].z, all.z);
        all.w = fmaf(weight, fetched_[k].w, all.w);
      }
    }
    return all;
  }
  __device__ void write_feature(int pair, float4 out) const {
    const int head = column_ / kChunks;
    write_output<typename Warp::Element>(plan_, pair * plan_.args.group + head,
                                         column_ % kChunks * 4, out, exchange_.rows()[head]);
  }

  const PairPlan& plan_;
  const PairParts& parts_;
  const Exchange<Warp::kHeadSize>& exchange_;
  int columns_, rows_, row_, column_;
  float4 fetched_[kAtOnce];
};

/// Signals that this CTA has written a part. The last CTA to arrive merges the pair's parts.
template <class Warp>
__device__ void arrive_and_merge(const PairPlan& plan, const PairParts& parts,
                                 const Exchange<Warp::kHeadSize>& exchange, int pair,
                                 std::uint32_t gone) {
  int before = 0;
  __syncthreads();
  if (threadIdx.x == 0) before = arrive(&plan.arrived[parts.first]);
  if (__syncthreads_or(before == parts.last - parts.first) == 0) return;
  if (threadIdx.x == 0) plan.arrived[parts.first] = 0;
  OutputMerge<Warp> merge(plan, parts, exchange);
  weigh_parts(plan, parts, exchange, pair);
  __syncthreads();
  store_evicted_end(plan, pair, gone);
  merge.write(pair);
}

/// The age of the evicted token whose slot the newest token has taken.
template <class Warp>
__device__ std::uint32_t gone_age(const PairAttention& args, const SlotsOfPair& slots) {
  if constexpr (Warp::kRotated == Rotated::keys) {
    if (slots.newest < args.table.lengths[slots.pair])
      return args.ages[slots.base / Warp::kHeadSize + slots.newest];
  }
  return PairRows::kNone;
}

/// Rotates the query for a pair's sinks. The given query is rotated to the newest token's original
/// position. At cache positions the query's distance to the sinks is smaller, because evicted
/// tokens do not count. So the query is rotated back by the number of evicted tokens.
template <class Warp>
class SinkRotation {
  using T = typename Warp::Element;
  static constexpr int kDim = Warp::kHeadSize;

 public:
  /// Computes everything that does not depend on the query.
  __device__ void start(const PairAttention& args, const TileCursor& cursor) {
    sinks_ = 0;
    const SlotsOfPair& slots = cursor.slots;
    const auto sinks = static_cast<int>(args.rules[slots.pair].sinks);
    const std::uint32_t gap = args.table.now[slots.pair / args.table.kv_heads] -
                              static_cast<std::uint32_t>(slots.live - 1);
    if (gap == 0 || cursor.tile * kSlotsPerTile >= sinks) return;
    sinks_ = sinks;
    cos_sin_ = rotation_back(frequency_of(args.inv_freq[threadIdx.x % kHalf]), gap);
  }
  /// Number of slots, from the pair's first one on, that use the rotated query.
  __device__ int sinks() const { return sinks_; }
  /// Called by the whole CTA. All threads may read the result afterwards. `query`: [head of the
  /// group, dim].
  __device__ void rotate(const T* query, int group, typename Ring<Warp>::Query& to) const {
    if (sinks_ == 0) return;
    const int low = threadIdx.x % kHalf, high = low + kHalf;
    const int rows = kThreads / kHalf, row = threadIdx.x / kHalf;
    for (int head = row; head < group && row < rows; head += rows) {
      const auto* const from = query + head * kDim;
      const float a = to_float(from[low]), b = to_float(from[high]);
      to.set(head, low, fmaf(a, cos_sin_.x, -b * cos_sin_.y));
      to.set(head, high, fmaf(b, cos_sin_.x, a * cos_sin_.y));
    }
    __syncthreads();
  }

 private:
  static constexpr int kHalf = kDim / 2;
  int sinks_ = 0;
  float2 cos_sin_;  ///< for dimensions threadIdx.x % kHalf and threadIdx.x % kHalf + kHalf
};

/// The parameters of a pair's tiles, which are computed before its first tile. Called by the whole
/// CTA.
template <class Warp, class Sinks>
__device__ __forceinline__ TileUse pair_use(const PairAttention& args, const SlotsOfPair& slots,
                                            const Ring<Warp>& ring,
                                            const typename Warp::Element* query,
                                            const Sinks& sink_rotation) {
  TileUse use{};
  if constexpr (Warp::kRotated == Rotated::query) {
    sink_rotation.rotate(query, args.group, ring.rotated_query());
    use.rotated_query = &ring.rotated_query();
  }
  if constexpr (Warp::kRotated == Rotated::keys) {
    use.angles.frequencies = ring.frequencies();
    use.angles.youngest = static_cast<std::uint32_t>(slots.live - 1);
    use.angles.gone = gone_age<Warp>(args, slots);
  }
  use.logits_stride = logits_stride(args.group);
  return use;
}

/// `Tiles` is TilesAhead or AllTilesAhead.
template <class Warp, class Tiles>
__global__ void __launch_bounds__(kThreads) attend_pairs(const __grid_constant__ PairPlan plan) {
  extern __shared__ __align__(16) unsigned char memory[];
  const PairAttention& args = plan.args;
  const Ring<Warp> ring{Tiles::stages(plan), memory};
  const Exchange<Warp::kHeadSize> exchange{
      args.group, reinterpret_cast<float*>(memory + Ring<Warp>::bytes(Tiles::stages(plan)))};
  if (!args.settled) wait_for_predecessor();
  const TileRow row(args.table);
  const EvenShare share(row.total(), plan.ctas);
  int left = share.begin(blockIdx.x + 1) - share.begin(blockIdx.x);
  if constexpr (Warp::kRotated == Rotated::keys)
    for (int i = threadIdx.x; i < Warp::kHeadSize / 2; i += kThreads)
      ring.frequencies()[i] = frequency_of(args.inv_freq[i]);
  // All threads have read the share; later kernels of the stream may change lengths
  __syncthreads();
  let_successor_start();
  if (left == 0) {
    wait_for_predecessor();
    return;
  }

  const int warp = threadIdx.x / 32;
  int at = share.begin(blockIdx.x);  // index among the tiles of all pairs
  TileCursor cursor = row.at(at, Warp::kHeadSize);
  Tiles tiles(plan, ring.tiles(warp), cursor, left);
  SinkRotation<Warp> sink_rotation;
  if constexpr (Warp::kRotated == Rotated::query) sink_rotation.start(args, cursor);
  wait_for_predecessor();
  Warp state;
  for (bool first = true; left > 0; first = false) {
    if (!first) {
      cursor.next_pair(args.table, Warp::kHeadSize);
      if constexpr (Warp::kRotated == Rotated::query) sink_rotation.start(args, cursor);
    }
    const SlotsOfPair& slots = cursor.slots;
    const int count = min(left, slots.tiles() - cursor.tile);
    const auto* const query = static_cast<const typename Warp::Element*>(args.q) +
                              std::int64_t{slots.pair} * args.group * Warp::kHeadSize;
    state.start(query, args.group);
    TileUse use = pair_use(args, slots, ring, query, sink_rotation);
    for (int i = 0; i < count; ++i) {
      const auto& tile = tiles.next();
      const int slot = (cursor.tile + i) * kSlotsPerTile + warp * Warp::kKeys;
      use.valid = slots.live - slot;
      use.angles.newest = slots.newest - slot;
      if constexpr (Warp::kRotated == Rotated::query) use.sinks = sink_rotation.sinks() - slot;
      if (args.rows.logits != nullptr)
        use.logits = args.rows.logits +
                     (slots.pair * row_slots(args.table.max_slots) + slot) * use.logits_stride;
      if (use.valid > 0) state.add(tile, use, plan.base2_scale);
    }
    if (!first) __syncthreads();  // all threads have read the part of the previous pair
    state.finish(exchange.part(warp));
    __syncthreads();
    const bool whole = count == slots.tiles();
    write_pair<Warp>(plan, exchange, slots.pair, whole, blockIdx.x * 2 + (first ? 0 : 1));
    if (whole) {
      store_evicted_end(plan, slots.pair, use.angles.gone);
    } else {
      arrive_and_merge<Warp>(plan, PairParts(share, at - cursor.tile, slots.tiles()), exchange,
                             slots.pair, use.angles.gone);
    }
    left -= count;
    at += count;
  }
}

template <class Warp, class Tiles>
cudaError_t launch_pairs(const DeviceLimits& limits, const PairPlan& plan, std::size_t shared_bytes,
                         cudaStream_t stream) {
  const auto kernel = attend_pairs<Warp, Tiles>;
  if (const cudaError_t error = allow_shared_memory(kernel, limits)) return error;
  return launch(limits, kernel, {plan.ctas, kThreads, shared_bytes, stream}, plan);
}

template <class Warp, bool kPaged>
cudaError_t launch_attention(const PairAttention& args, const kvlab_pages& paged,
                             cudaStream_t stream) {
  DeviceLimits limits;
  if (const cudaError_t error = device_limits(limits)) return error;
  const PairLaunch how = plan_pairs<Warp>(limits, args);
  // why_not_pair_attention() returns the reason.
  if (!how.plan.fits()) return cudaErrorNotSupported;
  const int ctas = how.plan.blocks;
  auto* const signals = static_cast<Signals*>(args.workspace);
  auto* const part_out = reinterpret_cast<float*>(signals + 1);
  const PairPlan plan{
      .args = args,
      .ctas = ctas,
      .base2_scale = args.softmax_scale * kLog2E,
      .part_out = part_out,
      .part_state = reinterpret_cast<float2*>(part_out + part_rows(args, ctas) * Warp::kHeadSize),
      .arrived = signals->arrived,
      .stages = how.plan.stages,
      .read_once = how.kernel != PairKernel::clusters,
      .paged = paged};
  if constexpr (kVariesStages<Warp>) {
    if (how.kernel == PairKernel::clusters)
      return launch_clusters<Warp, kPaged>(limits, plan, how.plan, stream);
    if (how.kernel == PairKernel::all_ahead)
      return launch_pairs<Warp, AllTilesAhead<Warp, kPaged>>(limits, plan, how.plan.shared_bytes,
                                                             stream);
  }
  return launch_pairs<Warp, TilesAhead<Warp, kPaged>>(limits, plan, how.plan.shared_bytes, stream);
}

}  // namespace kvlab::kernels
