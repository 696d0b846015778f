// Split-KV decode attention in one launch. It moves the keys and values once: 2 * head_size
// elements a live slot, and the floor is that over the read bandwidth. What it leaves for whoever
// observes, 4 bytes a slot and query head, stays in the L2 cache.
//
// All tiles of all pairs stand in one row, and the CTAs share them evenly, whatever the lengths: a
// pair is cut where a share ends. A CTA that has all of a pair writes its output; of a pair that is
// cut each CTA leaves a part in the workspace, and the last to arrive merges them in their order.
// So the grid depends on capacity and device alone, and lengths are read where the kernel runs.
#include <algorithm>

#include "kernels/decode_tile.cuh"
#include "kernels/device/even_share.cuh"
#include "kernels/device/grid_dependency.cuh"
#include "kernels/device/reduce.cuh"
#include "kernels/device/signal.cuh"
#include "kernels/launch.cuh"
#include "kernels/pair_row.cuh"

namespace kvlab::kernels {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;

/// The arguments, and what follows from them and from the device.
struct Plan {
  PairAttention args;
  int ctas;
  float base2_scale;      ///< softmax scale, for base-2 logits
  float* part_out;        // [cta, 2, head of the group, dim], not yet divided by the sum
  float2* part_state;     // [cta, 2, head of the group]: max, sum
  std::int32_t* arrived;  // [cta], zero between launches
};

/// What a CTA needs to merge a pair.
struct Merge {
  float weights[kMostCtas * kMostGroup];  // [part, head of the group]
  float2 rows[kMostGroup];                ///< largest logit, sum

  /// A place for each thread, in what a group of less than kMostGroup leaves free of the weights.
  __device__ float4* thread_outputs() {
    static_assert(kMostCtas >= kThreads * 4);
    return reinterpret_cast<float4*>(&weights[kMostCtas * (kMostGroup - 1)]);
  }
};

template <class Warp>
struct Shared {
  typename Warp::Tile tiles[kWarps][Warp::kStages];
  union {
    WarpPart<Warp::kHeadSize> parts[kWarps];
    Merge merge;
  };
  Frequency frequencies[Warp::kSqueezed ? Warp::kHeadSize / 2 : 1];
  bool is_last;
};

/// A warp's tiles, fetched ahead. Every kSlotsPerTile slots, warp w takes those from w * kKeys on.
template <class Warp>
class Fetcher {
 public:
  using T = typename Warp::Element;
  __device__ Fetcher(const Plan& plan, typename Warp::Tile* ring, const Place& place, int count)
      : args_(plan.args), ring_(ring), place_(place), left_(count) {
    for (int i = 0; i < Warp::kStages - 1; ++i) fetch();
  }
  /// The next tile, once it is there; the one before it may be overwritten.
  __device__ const typename Warp::Tile& next() {
    wait_copies<Warp::kStages - 2>();
    __syncwarp();
    fetch();
    const auto& tile = ring_[read_];
    read_ = read_ + 1 == Warp::kStages ? 0 : read_ + 1;
    return tile;
  }

 private:
  __device__ void fetch() {
    if (left_ > 0) {
      if (place_.tile == place_.slots.tiles()) place_.next_pair(args_.table, Warp::kHeadSize);
      // The newest token comes from the kernel before; the rest has been there.
      if (place_.slots.newest / kSlotsPerTile == place_.tile) wait_for_predecessor();
      const int slot = place_.tile * kSlotsPerTile + threadIdx.x / 32 * Warp::kKeys;
      const int valid = place_.slots.live - slot;
      const std::int64_t from =
          place_.slots.base + (valid > 0 ? std::int64_t{slot} * Warp::kHeadSize : 0);
      auto& tile = ring_[write_];
      tile.load_slots(static_cast<const T*>(args_.keys) + from,
                      static_cast<const T*>(args_.values) + from, valid);
      if constexpr (Warp::kSqueezed) tile.load(args_.ages + from / Warp::kHeadSize, valid);
      write_ = write_ + 1 == Warp::kStages ? 0 : write_ + 1;
      ++place_.tile;
      --left_;
    }
    commit_copies();
  }

  const PairAttention& args_;
  typename Warp::Tile* ring_;
  Place place_;
  int left_;
  int read_ = 0, write_ = 0;
};

/// Four dimensions of one query head, merged.
using State = SoftmaxState<4>;

template <class T>
__device__ void write_output(const Plan& plan, int row, int dim, float4 out, float2 max_and_sum) {
  T* const to = static_cast<T*>(plan.args.out) + std::int64_t{row} * plan.args.head_size + dim;
  const float sum = max_and_sum.y;
  to[0] = from_float<T>(out.x / sum);
  to[1] = from_float<T>(out.y / sum);
  to[2] = from_float<T>(out.z / sum);
  to[3] = from_float<T>(out.w / sum);
  if (dim == 0 && plan.args.lse != nullptr) plan.args.lse[row] = log_sum_exp(max_and_sum.x, sum);
}

/// For whoever observes. The flag may be raised once the whole CTA has come by.
__device__ void leave_softmax(const Plan& plan, int pair, int head, float2 max_and_sum) {
  if (plan.args.rows.softmax != nullptr)
    plan.args.rows.softmax[pair * kMostGroup + head] =
        make_float2(max_and_sum.x, 1 / max_and_sum.y);
}
__device__ void raise_ready(const Plan& plan, int pair, std::uint32_t gone) {
  if (plan.args.rows.ready == nullptr) return;
  if (plan.args.rows.gone != nullptr) plan.args.rows.gone[pair] = gone;
  raise_flag(&plan.args.rows.ready[pair]);
}

/// Merges what the warps found out about one pair, or about some tiles of it.
template <class Warp>
__device__ void write_pair(const Plan& plan, const Shared<Warp>& shared, int pair, bool whole,
                           int part) {
  constexpr int kDim = Warp::kHeadSize;
  const int group = plan.args.group;
  for (int i = threadIdx.x; i < group * kDim / 4; i += kThreads) {
    const int head = i / (kDim / 4), dim = i % (kDim / 4) * 4;
    State state;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const auto& found = shared.parts[w];
      const float4 out = *reinterpret_cast<const float4*>(&found.out[head][dim]);
      state = merge(state, State{found.max[head], found.sum[head], {out.x, out.y, out.z, out.w}});
    }
    const float4 out = make_float4(state.out[0], state.out[1], state.out[2], state.out[3]);
    const float2 max_and_sum = make_float2(state.max, state.sum);
    if (whole) {
      write_output<typename Warp::Element>(plan, pair * group + head, dim, out, max_and_sum);
      if (dim == 0) leave_softmax(plan, pair, head, max_and_sum);
    } else {
      const int row = part * group + head;
      *reinterpret_cast<float4*>(&plan.part_out[row * kDim + dim]) = out;
      if (dim == 0) plan.part_state[row] = max_and_sum;
    }
  }
}

/// The parts of a pair that is cut: one from each CTA `first` … `last`.
struct PairParts {
  int first, last;
  bool first_is_second;  ///< CTA `first` had another pair before, so this is its second part

  __device__ PairParts(const EvenShare& share, int begin, int tiles)
      : first(share.worker_of(begin)),
        last(share.worker_of(begin + tiles - 1)),
        first_is_second(share.begin(first) < begin) {}
  __device__ int count() const { return last - first + 1; }
  /// Row of part i in the workspace.
  __device__ int at(int i) const { return (first + i) * 2 + (i == 0 && first_is_second ? 1 : 0); }
};

/// What each part weighs; the sum is of all in a fixed order. A warp for each query head.
__device__ void weigh_parts(const Plan& plan, const PairParts& parts, Merge& merge) {
  const int lane = threadIdx.x % 32, count = parts.count();
  for (int head = threadIdx.x / 32; head < plan.args.group; head += kWarps) {
    float max = -INFINITY, sum = 0;
    for (int i = lane; i < count; i += 32)
      max = fmaxf(max, __ldcg(&plan.part_state[parts.at(i) * plan.args.group + head]).x);
    max = warp_max(max);
    for (int i = lane; i < count; i += 32) {
      const float2 state = __ldcg(&plan.part_state[parts.at(i) * plan.args.group + head]);
      const float weight = rescale(state.x, max);
      merge.weights[i * plan.args.group + head] = weight;
      sum = fmaf(weight, state.y, sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) merge.rows[head] = make_float2(max, sum);
  }
}

/// The weighted outputs of parts `first`, first + step, …, four dimensions of a query head.
__device__ float4 sum_parts(const Plan& plan, const PairParts& parts, const Merge& merge,
                            int columns, int column, int head, int first, int step) {
  const auto* const out = reinterpret_cast<const float4*>(plan.part_out);
  float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 8
  for (int i = first; i < parts.count(); i += step) {
    const float weight = merge.weights[i * plan.args.group + head];
    const float4 part = __ldcg(&out[parts.at(i) * columns + column]);
    sum.x = fmaf(weight, part.x, sum.x);
    sum.y = fmaf(weight, part.y, sum.y);
    sum.z = fmaf(weight, part.z, sum.z);
    sum.w = fmaf(weight, part.w, sum.w);
  }
  return sum;
}

/// Sums the outputs of all parts. Consecutive threads take consecutive columns of four dimensions;
/// where there are threads for several rows of them, row r takes parts r, r + rows, …
template <class Warp>
__device__ void merge_outputs(const Plan& plan, const PairParts& parts, Merge& merge, int pair) {
  using T = typename Warp::Element;
  constexpr int kChunks = Warp::kHeadSize / 4;
  const int group = plan.args.group, columns = group * kChunks, rows = kThreads / columns;
  const auto write = [&](int column, float4 sum) {
    const int head = column / kChunks;
    write_output<T>(plan, pair * group + head, column % kChunks * 4, sum, merge.rows[head]);
  };
  if (rows < 2) {
    for (int column = threadIdx.x; column < columns; column += kThreads)
      write(column, sum_parts(plan, parts, merge, columns, column, column / kChunks, 0, 1));
    return;
  }
  const int row = threadIdx.x / columns, column = threadIdx.x % columns;
  float4* const of_threads = merge.thread_outputs();
  if (row < rows)
    of_threads[threadIdx.x] =
        sum_parts(plan, parts, merge, columns, column, column / kChunks, row, rows);
  __syncthreads();
  if (row != 0) return;
  float4 sum = of_threads[column];
  for (int r = 1; r < rows; ++r) {
    const float4 other = of_threads[r * columns + column];
    sum = make_float4(sum.x + other.x, sum.y + other.y, sum.z + other.z, sum.w + other.w);
  }
  write(column, sum);
}

/// A part has been written: whoever comes last merges the pair's.
template <class Warp>
__device__ void arrive_and_merge(const Plan& plan, const PairParts& parts, Shared<Warp>& shared,
                                 int pair, std::uint32_t gone) {
  __syncthreads();
  if (threadIdx.x == 0) {
    std::int32_t* const arrived = &plan.arrived[parts.first];
    shared.is_last = arrive(arrived) == parts.last - parts.first;
    if (shared.is_last) *arrived = 0;
  }
  __syncthreads();
  if (!shared.is_last) return;
  weigh_parts(plan, parts, shared.merge);
  __syncthreads();
  if (threadIdx.x < plan.args.group)
    leave_softmax(plan, pair, threadIdx.x, shared.merge.rows[threadIdx.x]);
  __syncwarp();
  if (threadIdx.x == 0) raise_ready(plan, pair, gone);
  merge_outputs<Warp>(plan, parts, shared.merge, pair);
}

/// The age that the newest token's slot had: it has left.
template <class Warp>
__device__ std::uint32_t gone_age(const PairAttention& args, const PairSlots& slots) {
  if constexpr (Warp::kSqueezed) {
    if (slots.newest < args.table.lengths[slots.pair])
      return args.ages[slots.base / Warp::kHeadSize + slots.newest];
  }
  return PairRows::kNone;
}

template <class Warp>
__global__ void __launch_bounds__(kThreads) attend_pairs(const __grid_constant__ Plan plan) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<Warp>*>(memory);
  const PairAttention& args = plan.args;
  if (!args.settled) wait_for_predecessor();
  const TileRow row(args.table);
  const EvenShare share(row.total(), plan.ctas);
  int left = share.begin(blockIdx.x + 1) - share.begin(blockIdx.x);
  if constexpr (Warp::kSqueezed)
    for (int i = threadIdx.x; i < Warp::kHeadSize / 2; i += kThreads)
      shared.frequencies[i] = frequency_of(args.inv_freq[i]);
  __syncthreads();  // all of the CTA knows its share: what follows in the stream may change lengths
  let_successor_start();
  if (left == 0) {
    wait_for_predecessor();
    return;
  }

  const int warp = threadIdx.x / 32;
  int at = share.begin(blockIdx.x);  // in the row
  Place place = row.at(at, Warp::kHeadSize);
  Fetcher<Warp> fetcher(plan, shared.tiles[warp], place, left);
  wait_for_predecessor();
  Warp state;
  for (bool first = true; left > 0; first = false) {
    if (!first) place.next_pair(args.table, Warp::kHeadSize);
    const PairSlots& slots = place.slots;
    const int count = min(left, slots.tiles() - place.tile);
    state.start(static_cast<const typename Warp::Element*>(args.q) +
                    std::int64_t{slots.pair} * args.group * Warp::kHeadSize,
                args.group);
    TileUse use{};
    if constexpr (Warp::kSqueezed) {
      use.turns.frequencies = shared.frequencies;
      use.turns.youngest = static_cast<std::uint32_t>(slots.live - 1);
      use.turns.gone = gone_age<Warp>(args, slots);
    }
    use.logits_stride = row_slots(args.table.most_slots);
    for (int i = 0; i < count; ++i) {
      const auto& tile = fetcher.next();
      const int slot = (place.tile + i) * kSlotsPerTile + warp * Warp::kKeys;
      use.valid = slots.live - slot;
      use.turns.newest = slots.newest - slot;
      if (args.rows.logits != nullptr)
        use.logits = args.rows.logits + slots.pair * args.group * use.logits_stride + slot;
      if (use.valid > 0) state.add(tile, use, plan.base2_scale);
    }
    if (!first) __syncthreads();  // the pair before has been read
    state.finish(shared.parts[warp]);
    __syncthreads();
    const bool whole = count == slots.tiles();
    write_pair(plan, shared, slots.pair, whole, blockIdx.x * 2 + (first ? 0 : 1));
    if (whole) {
      if (args.rows.ready != nullptr) {
        __syncthreads();
        if (threadIdx.x == 0) raise_ready(plan, slots.pair, use.turns.gone);
      }
    } else {
      arrive_and_merge(plan, PairParts(share, at - place.tile, slots.tiles()), shared, slots.pair,
                       use.turns.gone);
    }
    left -= count;
    at += count;
  }
}

/// CTAs of `shared_bytes` that the device holds at once, but no more than there may be tiles; 0 if
/// it holds none.
int ctas_for(const DeviceLimits& limits, const PairTable& table, std::size_t shared_bytes) {
  constexpr int kReserved = 1024;  // of shared memory, by the system, for each CTA
  // What one CTA may have is all that a multiprocessor has, less what is reserved for it.
  const int on_one =
      (limits.shared_bytes + kReserved) / (static_cast<int>(shared_bytes) + kReserved);
  const std::int64_t tiles =
      std::int64_t{table.pairs} * (row_slots(table.most_slots) / kSlotsPerTile);
  return static_cast<int>(
      std::min<std::int64_t>({tiles, on_one * limits.multiprocessors, kMostCtas}));
}

/// Of the parts of pairs that are cut.
std::size_t part_rows(const PairAttention& args, int ctas) {
  return 2 * static_cast<std::size_t>(ctas) * static_cast<std::size_t>(args.group);
}

template <class Warp>
cudaError_t launch_attention(const PairAttention& args, cudaStream_t stream) {
  constexpr std::size_t kBytes = sizeof(Shared<Warp>);
  DeviceLimits limits;
  if (const cudaError_t error = device_limits(limits)) return error;
  const int ctas = ctas_for(limits, args.table, kBytes);
  if (ctas == 0) return cudaErrorInvalidDevice;
  auto* const signals = static_cast<Signals*>(args.workspace);
  auto* const part_out = reinterpret_cast<float*>(signals + 1);
  const Plan plan{
      .args = args,
      .ctas = ctas,
      .base2_scale = args.softmax_scale * kLog2E,
      .part_out = part_out,
      .part_state = reinterpret_cast<float2*>(part_out + part_rows(args, ctas) * Warp::kHeadSize),
      .arrived = signals->arrived};
  if (const cudaError_t error = cudaFuncSetAttribute(
          attend_pairs<Warp>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes))
    return error;
  return launch(limits, attend_pairs<Warp>, {ctas, kThreads, kBytes, stream}, plan);
}

/// Calls visit(Warp{}) for the type, head size and numbering, which must be supported.
template <class Visit>
auto dispatch(const PairAttention& args, Visit visit) {
  const auto by_numbering = [&]<int kDim, bool kSqueezed>() {
    switch (args.type) {
      case Type::bf16:
        return visit.template operator()<TensorCoreWarp<__nv_bfloat16, kDim, kSqueezed>>();
      case Type::f16:
        return visit.template operator()<TensorCoreWarp<__half, kDim, kSqueezed>>();
      case Type::f32:
        break;
    }
    return visit.template operator()<PlainWarp<kDim, kSqueezed>>();
  };
  const auto by_size = [&]<int kDim>() {
    return args.ages != nullptr ? by_numbering.template operator()<kDim, true>()
                                : by_numbering.template operator()<kDim, false>();
  };
  switch (args.head_size) {
    case 64:
      return by_size.template operator()<64>();
    case 96:
      return by_size.template operator()<96>();
    default:
      return by_size.template operator()<128>();
  }
}

bool supported(const PairAttention& args) {
  const PairTable& table = args.table;
  if (args.head_size != 64 && args.head_size != 96 && args.head_size != 128) return false;
  if (args.group < 1 || args.group > kMostGroup) return false;
  const std::int64_t per_16_bytes = 16 / static_cast<std::int64_t>(bytes_of(args.type));
  if (table.head_stride % per_16_bytes != 0 || table.sequence_stride % per_16_bytes != 0)
    return false;
  if (table.pairs < 1 || table.pairs > kMostPairs || table.kv_heads < 1 || table.most_slots < 1)
    return false;
  return table.pairs * row_slots(table.most_slots) / kSlotsPerTile < 1 << 30;
}

}  // namespace

std::size_t pair_attention_workspace(const PairAttention& args) {
  DeviceLimits limits;
  if (!supported(args) || device_limits(limits) != cudaSuccess) return 0;
  return dispatch(args, [&]<class Warp>() {
    const int ctas = ctas_for(limits, args.table, sizeof(Shared<Warp>));
    return sizeof(Signals) +
           part_rows(args, ctas) * (Warp::kHeadSize * sizeof(float) + sizeof(float2));
  });
}

cudaError_t pair_attention(const PairAttention& args, cudaStream_t stream) {
  const PairTable& table = args.table;
  if (!supported(args)) return cudaErrorInvalidValue;
  for (const void* pointer : {args.q, args.keys, args.values, static_cast<const void*>(args.out),
                              static_cast<const void*>(args.workspace)})
    if (pointer == nullptr || !aligned16(pointer)) return cudaErrorInvalidValue;
  if (table.lengths == nullptr || (table.next_slots != nullptr && table.first_slot == nullptr) ||
      (args.ages != nullptr && args.inv_freq == nullptr))
    return cudaErrorInvalidValue;
  return dispatch(args, [&]<class Warp>() { return launch_attention<Warp>(args, stream); });
}

}  // namespace kvlab::kernels
