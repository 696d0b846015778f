// Split-KV decode attention. It moves the keys and values once: 2 * lengths * kv_heads * head_size
// elements, and the floor is that over the read bandwidth.
//
// All tiles of all sequences and KV heads stand in one row, and the CTAs share them evenly,
// whatever the lengths: a KV head is cut where a share ends. A CTA that has all of a KV head writes
// its output; of a KV head that is cut each CTA leaves a part in the workspace, and a second kernel
// merges them in order. So the grid depends on capacity and device alone, and lengths are read
// where the kernels run.
#include <algorithm>

#include "kernels/attention.hpp"
#include "kernels/decode_tile.cuh"
#include "kernels/device/even_share.cuh"
#include "kernels/device/grid_dependency.cuh"
#include "kernels/launch.cuh"

namespace kvlab::kernels {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
constexpr int kTile = kWarps * 16;  ///< slots that a CTA takes at a time

/// The arguments, and what follows from them and from the device.
struct Plan {
  DecodeAttentionArgs args;
  int group;
  int ctas;            ///< of the first kernel
  float base2_scale;   ///< softmax scale, for base-2 logits
  float* part_out;     // [cta, 2, head of the group, dim], not yet divided by the sum
  float2* part_state;  // [cta, 2, head of the group]: max, sum
};

/// Tiles of all KV heads of a sequence.
__device__ int tiles_per_head(const Plan& plan, int sequence) {
  const int length = min(max(plan.args.lengths[sequence], 0), plan.args.slots);
  return (length + kTile - 1) / kTile;
}

/// Where in the row of tiles the sequences stand. All functions take a whole warp.
struct Row {
  const Plan& plan;

  /// Tiles of the sequences before `end`.
  __device__ int tiles_before(int end) const {
    int tiles = 0;
    for (int s = threadIdx.x % 32; s < end; s += 32)
      tiles += tiles_per_head(plan, s) * plan.args.shape.kv_heads;
    return __reduce_add_sync(~0u, tiles);
  }

  /// The sequence that holds `tile` of the row, which must exist; makes `tile` relative to it.
  __device__ int sequence_of(int& tile) const {
    const int lane = threadIdx.x % 32;
    for (int first = 0;; first += 32) {
      const int mine = first + lane < plan.args.sequences
                           ? tiles_per_head(plan, first + lane) * plan.args.shape.kv_heads
                           : 0;
      int up_to = mine;
      for (int step = 1; step < 32; step *= 2) {
        const int below = __shfl_up_sync(~0u, up_to, step);
        if (lane >= step) up_to += below;
      }
      const unsigned beyond = __ballot_sync(~0u, tile < up_to);
      if (beyond != 0) {
        const int found = __ffs(static_cast<int>(beyond)) - 1;
        tile -= __shfl_sync(~0u, up_to - mine, found);
        return first + found;
      }
      tile -= __shfl_sync(~0u, up_to, 31);
    }
  }
};

/// A tile's place; walks over the row.
struct Place {
  int sequence, kv_head, tile, tiles;  ///< tiles: of this KV head

  __device__ Place(const Plan& plan, int tile_of_row) {
    sequence = Row{plan}.sequence_of(tile_of_row);
    tiles = tiles_per_head(plan, sequence);
    kv_head = tile_of_row / tiles;
    tile = tile_of_row % tiles;
  }
  /// To the next KV head's first tile, which must exist.
  __device__ void next_head(const Plan& plan) {
    tile = 0;
    if (++kv_head < plan.args.shape.kv_heads) return;
    kv_head = 0;
    do tiles = tiles_per_head(plan, ++sequence);
    while (tiles == 0);
  }
};

template <class Warp>
struct Shared {
  typename Warp::Tile tiles[kWarps][Warp::kStages];
  WarpPart<Warp::kHeadSize> parts[kWarps];
};

/// A warp's tiles, fetched ahead. Every kTile slots, warp w takes those from w * kKeys on.
template <class Warp>
class Fetcher {
 public:
  using T = typename Warp::Element;
  __device__ Fetcher(const Plan& plan, typename Warp::Tile* ring, const Place& place, int count)
      : plan_(plan), ring_(ring), place_(place), left_(count) {
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
      if (place_.tile == place_.tiles) place_.next_head(plan_);
      const auto& args = plan_.args;
      const int slot = place_.tile * kTile + threadIdx.x / 32 * Warp::kKeys;
      const int valid = min(args.lengths[place_.sequence], args.slots) - slot;
      const std::int64_t from = place_.sequence * args.shape.sequence_stride +
                                place_.kv_head * args.shape.head_stride +
                                (valid > 0 ? std::int64_t{slot} * Warp::kHeadSize : 0);
      ring_[write_].load(static_cast<const T*>(args.keys) + from,
                         static_cast<const T*>(args.values) + from, valid);
      write_ = write_ + 1 == Warp::kStages ? 0 : write_ + 1;
      ++place_.tile;
      --left_;
    }
    commit_copies();
  }

  const Plan& plan_;
  typename Warp::Tile* ring_;
  Place place_;
  int left_;
  int read_ = 0, write_ = 0;
};

/// Four dimensions of one query head, merged.
using State = SoftmaxState<4>;

__device__ State as_state(float2 max_and_sum, float4 out) {
  return {max_and_sum.x, max_and_sum.y, {out.x, out.y, out.z, out.w}};
}

template <class T>
__device__ void write_output(const Plan& plan, int sequence, int query_head, int dim,
                             const State& state) {
  const std::int64_t head = std::int64_t{sequence} * plan.args.shape.query_heads + query_head;
  T* out = static_cast<T*>(plan.args.out) + head * plan.args.shape.head_size + dim;
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = from_float<T>(state.out[i] / state.sum);
  if (dim == 0 && plan.args.lse != nullptr) plan.args.lse[head] = log_sum_exp(state.max, state.sum);
}

/// Merges what the warps found out about one KV head, or about some tiles of it.
template <class Warp>
__device__ void write_head(const Plan& plan, const Shared<Warp>& shared, const Place& place,
                           bool whole, int part) {
  constexpr int kDim = Warp::kHeadSize;
  for (int i = threadIdx.x; i < plan.group * kDim / 4; i += kThreads) {
    const int head = i / (kDim / 4), dim = i % (kDim / 4) * 4;
    State state;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const auto& found = shared.parts[w];
      state = merge(state, as_state(make_float2(found.max[head], found.sum[head]),
                                    *reinterpret_cast<const float4*>(&found.out[head][dim])));
    }
    if (whole) {
      write_output<typename Warp::Element>(plan, place.sequence, place.kv_head * plan.group + head,
                                           dim, state);
    } else {
      const int row = part * plan.group + head;
      *reinterpret_cast<float4*>(&plan.part_out[row * kDim + dim]) =
          make_float4(state.out[0], state.out[1], state.out[2], state.out[3]);
      if (dim == 0) plan.part_state[row] = make_float2(state.max, state.sum);
    }
  }
}

template <class Warp>
__global__ void __launch_bounds__(kThreads) decode_parts(const __grid_constant__ Plan plan) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<Warp>*>(memory);
  wait_for_predecessor();
  let_successor_start();
  const auto& args = plan.args;
  const EvenShare share(Row{plan}.tiles_before(args.sequences), plan.ctas);
  int left = share.begin(blockIdx.x + 1) - share.begin(blockIdx.x);
  if (left == 0) return;

  const int warp = threadIdx.x / 32;
  Place place(plan, share.begin(blockIdx.x));
  Fetcher<Warp> fetcher(plan, shared.tiles[warp], place, left);
  Warp state;
  for (bool first = true; left > 0; first = false) {
    if (!first) place.next_head(plan);
    const int count = min(left, place.tiles - place.tile);
    const std::int64_t query_row =
        std::int64_t{place.sequence} * args.shape.query_heads + place.kv_head * plan.group;
    state.start(static_cast<const typename Warp::Element*>(args.q) + query_row * Warp::kHeadSize,
                plan.group);
    const int length = min(args.lengths[place.sequence], args.slots);
    for (int i = 0; i < count; ++i) {
      const auto& tile = fetcher.next();
      const int valid = length - (place.tile + i) * kTile - warp * Warp::kKeys;
      if (valid > 0) state.add(tile, valid, plan.base2_scale);
    }
    if (!first) __syncthreads();  // the head before has been read
    state.finish(shared.parts[warp], plan.group);
    __syncthreads();
    write_head(plan, shared, place, count == place.tiles, blockIdx.x * 2 + (first ? 0 : 1));
    left -= count;
  }
}

constexpr int kMergeRows = 8;

/// One query head of one sequence, by kMergeRows rows of head_size / 4 threads. Row r takes parts
/// r, r + kMergeRows, …
template <class T>
__global__ void decode_merge(const __grid_constant__ Plan plan) {
  __shared__ float2 row_state[kMergeRows][32];
  __shared__ float4 row_out[kMergeRows][32];
  const int query_head = blockIdx.x, sequence = blockIdx.y;
  const int chunks = plan.args.shape.head_size / 4;
  const int chunk = threadIdx.x % chunks, row = threadIdx.x / chunks;
  const int tiles = tiles_per_head(plan, sequence);
  const Row all{plan};
  const EvenShare share(all.tiles_before(plan.args.sequences), plan.ctas);
  const int begin = all.tiles_before(sequence) + query_head / plan.group * tiles;
  wait_for_predecessor();
  let_successor_start();
  if (tiles == 0) return;
  const int first = share.worker_of(begin), last = share.worker_of(begin + tiles - 1);
  if (first == last) return;  // written already

  State state;
#pragma unroll 4
  for (int cta = first + row; cta <= last; cta += kMergeRows) {
    // A CTA's first part stands before its second; it is not the first if the CTA began before us.
    const int part = cta * 2 + (share.begin(cta) < begin ? 1 : 0);
    const int at = part * plan.group + query_head % plan.group;
    const auto* out = reinterpret_cast<const float4*>(plan.part_out) + at * chunks + chunk;
    state = merge(state, as_state(plan.part_state[at], *out));
  }
  row_state[row][chunk] = make_float2(state.max, state.sum);
  row_out[row][chunk] = make_float4(state.out[0], state.out[1], state.out[2], state.out[3]);
  __syncthreads();
  if (row != 0) return;
  for (int r = 1; r < kMergeRows; ++r)
    state = merge(state, as_state(row_state[r][chunk], row_out[r][chunk]));
  write_output<T>(plan, sequence, query_head, chunk * 4, state);
}

/// CTAs of `shared_bytes` that the device holds at once, but no more than there may be tiles; 0 if
/// it holds none.
int ctas_for(const DeviceLimits& limits, const AttentionShape& shape, int sequences, int slots,
             std::size_t shared_bytes) {
  constexpr int kReserved = 1024;  // of shared memory, by the system, for each CTA
  // What one CTA may have is all that a multiprocessor has, less what is reserved for it.
  const int on_one =
      (limits.shared_bytes + kReserved) / (static_cast<int>(shared_bytes) + kReserved);
  const std::int64_t tiles =
      std::int64_t{sequences} * shape.kv_heads * ((slots + kTile - 1) / kTile);
  return static_cast<int>(std::min<std::int64_t>(tiles, on_one * limits.multiprocessors));
}

template <class Warp>
cudaError_t launch_both(Plan plan, cudaStream_t stream) {
  constexpr std::size_t kBytes = sizeof(Shared<Warp>);
  const DecodeAttentionArgs& args = plan.args;
  DeviceLimits limits;
  if (const cudaError_t error = device_limits(limits)) return error;
  plan.ctas = ctas_for(limits, args.shape, args.sequences, args.slots, kBytes);
  if (plan.ctas == 0) return cudaErrorInvalidDevice;
  plan.part_out = static_cast<float*>(args.workspace);
  plan.part_state = reinterpret_cast<float2*>(plan.part_out + std::size_t(plan.ctas) * 2 *
                                                                  plan.group * Warp::kHeadSize);
  if (const cudaError_t error = cudaFuncSetAttribute(
          decode_parts<Warp>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes))
    return error;
  const Launch parts{plan.ctas, kThreads, kBytes, stream};
  if (const cudaError_t error = launch(limits, decode_parts<Warp>, parts, plan)) return error;
  const Launch merge{dim3(args.shape.query_heads, args.sequences), Warp::kHeadSize / 4 * kMergeRows,
                     0, stream};
  return launch(limits, decode_merge<typename Warp::Element>, merge, plan);
}

/// Calls visit(Warp{}) for the shape's type and head size, which must be supported.
template <class Visit>
auto dispatch(const AttentionShape& shape, Visit visit) {
  const auto by_type = [&]<int kDim>() {
    switch (shape.type) {
      case Type::bf16:
        return visit.template operator()<TensorCoreWarp<__nv_bfloat16, kDim>>();
      case Type::f16:
        return visit.template operator()<TensorCoreWarp<__half, kDim>>();
      case Type::f32:
        break;
    }
    return visit.template operator()<PlainWarp<kDim>>();
  };
  switch (shape.head_size) {
    case 64:
      return by_type.template operator()<64>();
    case 96:
      return by_type.template operator()<96>();
    default:
      return by_type.template operator()<128>();
  }
}

bool supported(const AttentionShape& shape, int sequences, int slots) {
  if (shape.head_size != 64 && shape.head_size != 96 && shape.head_size != 128) return false;
  if (shape.kv_heads < 1 || shape.query_heads < 1 || shape.query_heads % shape.kv_heads != 0)
    return false;
  if (shape.query_heads / shape.kv_heads > kMostGroup) return false;
  const std::int64_t per_16_bytes = 16 / static_cast<std::int64_t>(bytes_of(shape.type));
  if (shape.head_stride % per_16_bytes != 0 || shape.sequence_stride % per_16_bytes != 0)
    return false;
  constexpr int kMostSequences = 65535;  // the second dimension of a grid
  if (sequences < 1 || sequences > kMostSequences || slots < 1) return false;
  return std::int64_t{sequences} * shape.kv_heads * ((slots + kTile - 1) / kTile) < 1 << 30;
}

bool aligned(const void* pointer) {
  return pointer != nullptr && reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0;
}

}  // namespace

std::size_t decode_attention_workspace(const AttentionShape& shape, int sequences, int slots) {
  DeviceLimits limits;
  if (!supported(shape, sequences, slots) || device_limits(limits) != cudaSuccess) return 0;
  return dispatch(shape, [&]<class Warp>() {
    const std::size_t parts = 2 * ctas_for(limits, shape, sequences, slots, sizeof(Shared<Warp>));
    const std::size_t group = shape.query_heads / shape.kv_heads;
    return parts * group * (Warp::kHeadSize * sizeof(float) + sizeof(float2));
  });
}

cudaError_t decode_attention(const DecodeAttentionArgs& args, cudaStream_t stream) {
  if (!supported(args.shape, args.sequences, args.slots)) return cudaErrorInvalidValue;
  if (!aligned(args.q) || !aligned(args.keys) || !aligned(args.values) || !aligned(args.out) ||
      !aligned(args.workspace) || args.lengths == nullptr)
    return cudaErrorInvalidValue;
  Plan plan{};
  plan.args = args;
  plan.group = args.shape.query_heads / args.shape.kv_heads;
  plan.base2_scale = args.shape.softmax_scale * kLog2E;
  return dispatch(args.shape, [&]<class Warp>() { return launch_both<Warp>(plan, stream); });
}

}  // namespace kvlab::kernels
