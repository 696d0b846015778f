// Kernels of mixture-of-experts layers. With few tokens, reading the weights of their experts takes
// most of the time. With many tokens, the tokens of a tile, which have the same expert, share one
// read of the expert's weights, and the tensor cores limit the speed. Instantiated for 2 types x
// tiles of 16 and 64 pairs, and for plain float32.
#include "kernels/linear/experts.hpp"

#include <algorithm>
#include <cub/block/block_scan.cuh>

#include "kernels/device/grid_dependency.cuh"
#include "kernels/device/row_norm.cuh"
#include "kernels/device/tensor_core.cuh"
#include "kernels/device/type_dispatch.cuh"
#include "kernels/launch.cuh"
#include "kernels/launch_plans.hpp"

namespace kvlab::kernels {
namespace {

constexpr int kRouteThreads = 256, kRouteWarps = kRouteThreads / kWarpSize;
/// Maximum number of tokens for which one thread block both chooses the experts and groups the
/// pairs by expert.
constexpr int kFewTokens = kMaxExperts / kWarpSize;
constexpr int kMaxHidden = 8192;

/// Combines a logit and its expert in one integer. A larger logit or, among equal logits, a lower
/// expert gives a larger integer. A NaN logit also has a defined place in this order.
__device__ inline unsigned long long order_key(float logit, int expert) {
  const auto bits = __float_as_uint(logit + 0.0f);
  const std::uint32_t order = bits >> 31 ? ~bits : bits | 0x80000000u;
  return (static_cast<unsigned long long>(order) << 32) |
         (0xffffffffu - static_cast<std::uint32_t>(expert));
}

/// Chooses the experts with the largest logits for a token, and computes their shares. Called by
/// one warp.
__device__ void choose(const RouteArgs& args, int token) {
  const Routes& to = args.routes;
  const float* const logits = args.logits + std::int64_t{token} * to.experts;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  std::uint32_t taken = 0;  // bit i: expert lane + 32 * i is already chosen
  float own = -INFINITY;    // logit of the expert that this lane writes
  for (int c = 0; c < to.chosen; ++c) {
    unsigned long long best = 0;
    for (int i = 0, e = lane; e < to.experts; ++i, e += kWarpSize)
      if ((taken >> i & 1) == 0) best = max(best, order_key(logits[e], e));
    best = warp_max(best);
    const auto expert = static_cast<int>(0xffffffffu - static_cast<std::uint32_t>(best));
    if (expert % kWarpSize == lane) taken |= 1u << expert / kWarpSize;
    if (c != lane) continue;
    own = logits[expert];
    to.expert[token * to.chosen + c] = expert;
  }
  const float largest = __shfl_sync(~0u, own, 0);
  float sum = 0;
  if (args.among_chosen)
    sum = lane < to.chosen ? expf(own - largest) : 0;
  else
    for (int e = lane; e < to.experts; e += kWarpSize) sum += expf(logits[e] - largest);
  sum = warp_sum(sum);
  if (lane < to.chosen) to.shares[token * to.chosen + lane] = expf(own - largest) / sum;
}

/// blockIdx.x is the token, and blockIdx.y the part of its logits. The thread block first computes
/// the normed token in shared memory. Then each warp computes some logits.
template <class T>
__global__ void __launch_bounds__(kRouteThreads) logits_kernel(const RouteArgs args) {
  extern __shared__ __align__(16) float row[];
  __shared__ float sums[kRouteWarps];
  let_successor_start();
  wait_for_predecessor();
  const int hidden = args.hidden, experts = args.routes.experts;
  const float* const x = args.x + std::size_t{blockIdx.x} * hidden;
  const float scale = scale_of<kRouteThreads>(x, args.norm, hidden, sums);
  for (int at = static_cast<int>(threadIdx.x) * 8; at < hidden; at += kRouteThreads * 8) {
    float value[8];
    load_eight(x + at, value);
    multiply_eight<T>(args.norm, scale, at, value);
    store_eight(value, row + at);
    if (blockIdx.y == 0)
      store_eight(value, static_cast<T*>(args.normed) + std::size_t{blockIdx.x} * hidden + at);
  }
  __syncthreads();
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize,
            lane = static_cast<int>(threadIdx.x) % kWarpSize;
  for (int e = static_cast<int>(blockIdx.y) * kRouteWarps + warp; e < experts;
       e += static_cast<int>(gridDim.y) * kRouteWarps) {
    const T* const weights = static_cast<const T*>(args.weight) + std::size_t(e) * hidden;
    float sum = 0;
    for (int at = lane * 8; at < hidden; at += kWarpSize * 8) {
      float w[8];
      load_eight(weights + at, w);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum = fmaf(w[i], row[at + i], sum);
    }
    sum = warp_sum(sum);
    if (args.bias) sum += to_float(static_cast<const T*>(args.bias)[e]);
    if (lane == 0) args.logits[std::size_t{blockIdx.x} * experts + e] = sum;
  }
}

/// Uses one warp for each token.
__global__ void __launch_bounds__(kRouteThreads) choose_kernel(const RouteArgs args) {
  let_successor_start();
  wait_for_predecessor();
  const int token = static_cast<int>(blockIdx.x * kRouteThreads + threadIdx.x) / kWarpSize;
  if (token < args.routes.tokens) choose(args, token);
}

/// One thread block groups the pairs by expert and, if there are few tokens, also chooses the
/// experts. The order of an expert's pairs is arbitrary, because results do not depend on it.
template <bool kChooses>
__global__ void __launch_bounds__(kMaxExperts) group_kernel(const RouteArgs args) {
  using Scan = cub::BlockScan<int, kMaxExperts>;
  __shared__ typename Scan::TempStorage memory;
  __shared__ int places[kMaxExperts];
  let_successor_start();
  wait_for_predecessor();
  const Routes& routes = args.routes;
  const int own = static_cast<int>(threadIdx.x), pairs = routes.tokens * routes.chosen;
  places[own] = 0;
  if (kChooses && own / kWarpSize < routes.tokens) choose(args, own / kWarpSize);
  __syncthreads();
  for (int pair = own; pair < pairs; pair += kMaxExperts)
    atomicAdd(&places[routes.expert[pair]], 1);
  __syncthreads();
  int start = places[own];
  Scan(memory).ExclusiveSum(start, start);
  places[own] = start;
  if (own < routes.experts) routes.starts[own] = start;
  if (own == 0) routes.starts[routes.experts] = pairs;
  __syncthreads();
  for (int pair = own; pair < pairs; pair += kMaxExperts)
    routes.order[atomicAdd(&places[routes.expert[pair]], 1)] = pair;
}

/// Some of the pairs that one expert processes.
struct PairTile {
  /// Expert, and a range in Routes::order; count <= 0: there is no such tile.
  int expert, first, count;
};

/// Finds tile number `tile` among the tiles of all experts, which are counted in the order of the
/// experts. Called by every warp.
template <int kPairs>
__device__ PairTile tile_at(const Routes& routes, int tile) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  for (int base = 0; base < routes.experts; base += kWarpSize) {
    const int e = base + lane;
    const int first = e < routes.experts ? routes.starts[e] : 0;
    const int count = e < routes.experts ? routes.starts[e + 1] - first : 0;
    const int tiles = (count + kPairs - 1) / kPairs, up_to = warp_prefix_sum(tiles);
    const unsigned beyond = __ballot_sync(~0u, tile < up_to);
    if (beyond != 0) {
      const int found = __ffs(static_cast<int>(beyond)) - 1;
      const int before = (tile - __shfl_sync(~0u, up_to - tiles, found)) * kPairs;
      return {base + found, __shfl_sync(~0u, first, found) + before,
              min(__shfl_sync(~0u, count, found) - before, kPairs)};
    }
    tile -= __shfl_sync(~0u, up_to, kWarpSize - 1);
  }
  return {0, 0, 0};
}

/// Writes one output of a pair.
template <class T>
__device__ void write_output(const ExpertProductArgs& args, int expert, int pair, int column,
                             float value) {
  if (args.bias) value += to_float(static_cast<const T*>(args.bias)[expert * args.n + column]);
  const std::size_t at = std::size_t(pair) * args.n + column;
  if (args.y)
    static_cast<T*>(args.y)[at] = from_float<T>(value);
  else
    args.y_float[at] = value;
}

constexpr int kWarps = 4, kThreads = kWarps * kWarpSize;
constexpr int kStages = 4;
/// Number of outputs of a tile, and number of inputs that are loaded at once.
constexpr int kColumns = 64, kDepth = 64;

template <class T, int kPairs>
struct alignas(16) Stage {
  T x[kPairs * kDepth], weights[kColumns * kDepth];
};

/// The chunks that a thread copies for each stage: one chunk in every sixteenth row.
template <class T, int kPairs>
class StageLoader {
 public:
  using Layout = Swizzled<kDepth * sizeof(T)>;
  static constexpr int kRowsAtOnce = kThreads / Layout::kChunks;

  __device__ StageLoader(const ExpertProductArgs& args, const PairTile& tile)
      : any_(static_cast<const T*>(args.x)), k_(args.k) {
#pragma unroll
    for (int i = 0; i < kPairs / kRowsAtOnce; ++i) {
      const int row = i * kRowsAtOnce + own_row();
      const int pair = row < tile.count ? args.routes.order[tile.first + row] : -1;
      const int from = pair < 0 ? 0 : args.by_token ? pair / args.routes.chosen : pair;
      x_[i] = pair < 0 ? nullptr : static_cast<const T*>(args.x) + std::size_t(from) * k_;
    }
    const int column = static_cast<int>(blockIdx.x) * kColumns + own_row();
    weights_ =
        static_cast<const T*>(args.weight) + (std::size_t(tile.expert) * args.n + column) * args.k;
    columns_ = args.n - column;
  }
  /// Copies inputs from `first` on. Writes zeros for inputs, pairs and outputs beyond the last one.
  __device__ void load(Stage<T, kPairs>& stage, int first) const {
    const int at = first + own_chunk() * 8;
    const bool there = at < k_;
#pragma unroll
    for (int i = 0; i < kPairs / kRowsAtOnce; ++i) {
      const bool wanted = there && x_[i] != nullptr;
      copy_async(shared_address(stage.x) + Layout::offset(i * kRowsAtOnce + own_row(), own_chunk()),
                 wanted ? x_[i] + at : any_, wanted);
    }
#pragma unroll
    for (int i = 0; i < kColumns / kRowsAtOnce; ++i) {
      const bool wanted = there && i * kRowsAtOnce < columns_;
      const T* const row = weights_ + std::size_t(i * kRowsAtOnce) * k_;
      copy_async(
          shared_address(stage.weights) + Layout::offset(i * kRowsAtOnce + own_row(), own_chunk()),
          wanted ? row + at : any_, wanted);
    }
  }

 private:
  __device__ static int own_row() { return static_cast<int>(threadIdx.x) / Layout::kChunks; }
  __device__ static int own_chunk() { return static_cast<int>(threadIdx.x) % Layout::kChunks; }

  const T* any_;  ///< a valid address, for copies that write zeros and read nothing
  const T* x_[kPairs / kRowsAtOnce];
  const T* weights_;
  int k_, columns_;
};

/// The products that a warp computes for a stage: all pairs times 16 of the columns.
template <class T, int kPairs>
__device__ void multiply(const Stage<T, kPairs>& stage, float (&sums)[kPairs / 16][2][4]) {
  using Layout = Swizzled<kDepth * sizeof(T)>;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize,
            column = static_cast<int>(threadIdx.x) / kWarpSize * 16 + lane / 16 * 8 + lane % 8;
#pragma unroll
  for (int d = 0; d < kDepth / 16; ++d) {
    std::uint32_t b[4];
    load_matrices(b, shared_address(stage.weights) + Layout::offset(column, d * 2 + lane / 8 % 2));
#pragma unroll
    for (int m = 0; m < kPairs / 16; ++m) {
      std::uint32_t a[4];
      load_matrices(
          a, shared_address(stage.x) + Layout::offset(m * 16 + lane % 16, d * 2 + lane / 16));
      multiply_add<T>(sums[m][0], a, b[0], b[1]);
      multiply_add<T>(sums[m][1], a, b[2], b[3]);
    }
  }
}

/// blockIdx.x selects 64 outputs, and blockIdx.y a tile of pairs.
template <class T, int kPairs>
__global__ void __launch_bounds__(kThreads)
    expert_tiles(const __grid_constant__ ExpertProductArgs args) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto* const stages = reinterpret_cast<Stage<T, kPairs>*>(memory);
  let_successor_start();
  wait_for_predecessor();
  const PairTile tile = tile_at<kPairs>(args.routes, static_cast<int>(blockIdx.y));
  if (tile.count <= 0) return;
  const StageLoader<T, kPairs> loader(args, tile);
  const int steps = (args.k + kDepth - 1) / kDepth;
  const auto fetch = [&](int step) {
    if (step < steps) loader.load(stages[step % kStages], step * kDepth);
    commit_copies();
  };
  for (int step = 0; step < kStages - 1; ++step) fetch(step);
  float sums[kPairs / 16][2][4] = {};
  for (int step = 0; step < steps; ++step) {
    wait_copies<kStages - 2>();
    __syncthreads();  // this stage has arrived, and the previous stage has been read
    fetch(step + kStages - 1);
    multiply<T, kPairs>(stages[step % kStages], sums);
  }
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize,
            first = static_cast<int>(blockIdx.x) * kColumns +
                    static_cast<int>(threadIdx.x) / kWarpSize * 16 + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < kPairs / 8; ++i) {
    const int row = i * 8 + lane / 4;
    if (row >= tile.count) continue;
    const int pair = args.routes.order[tile.first + row];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int column = first + n / 2 * 8 + n % 2;
      if (column < args.n)
        write_output<T>(args, tile.expert, pair, column, sums[i / 2][n / 2][i % 2 * 2 + n % 2]);
    }
  }
}

constexpr int kPlainPairs = 8;

/// One warp computes one output for all pairs of the tile.
__global__ void __launch_bounds__(kThreads) expert_plain(const ExpertProductArgs args) {
  let_successor_start();
  wait_for_predecessor();
  const PairTile tile = tile_at<kPlainPairs>(args.routes, static_cast<int>(blockIdx.y));
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize,
            column =
                static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / kWarpSize;
  if (tile.count <= 0 || column >= args.n) return;
  const float* const weights = static_cast<const float*>(args.weight) +
                               (std::size_t(tile.expert) * args.n + column) * args.k;
  for (int i = 0; i < tile.count; ++i) {
    const int pair = args.routes.order[tile.first + i];
    const int from = args.by_token ? pair / args.routes.chosen : pair;
    const float* const x = static_cast<const float*>(args.x) + std::size_t(from) * args.k;
    float sum = 0;
    for (int at = lane; at < args.k; at += kWarpSize) sum = fmaf(weights[at], x[at], sum);
    sum = warp_sum(sum);
    if (lane == 0) write_output<float>(args, tile.expert, pair, column, sum);
  }
}

/// Memory traffic: hidden * (8 + 4 * chosen) bytes per token. Uses one thread for eight elements of
/// a token.
__global__ void __launch_bounds__(kThreads)
    add_shares_kernel(const Routes routes, const float* y, int hidden, float* x) {
  let_successor_start();
  wait_for_predecessor();
  const int at = static_cast<int>(blockIdx.y * kThreads + threadIdx.x) * 8;
  if (at >= hidden) return;
  float* const to = x + std::size_t{blockIdx.x} * hidden + at;
  float sum[8];
  load_eight(to, sum);
  for (int c = 0; c < routes.chosen; ++c) {
    const std::size_t pair = std::size_t{blockIdx.x} * routes.chosen + c;
    const float share = routes.shares[pair];
    float value[8];
    load_eight(y + pair * hidden + at, value);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = fmaf(share, value[i], sum[i]);
  }
  store_eight(sum, to);
}

bool valid(const Routes& routes) {
  constexpr int kMaxPairs = 1 << 24;
  return routes.tokens > 0 && routes.chosen > 0 && routes.chosen <= routes.experts &&
         routes.experts <= kMaxExperts && routes.chosen <= kMaxChosen &&
         routes.tokens <= kMaxPairs / routes.chosen && routes.shares && routes.expert &&
         routes.order && routes.starts;
}

/// Maximum number of tiles: at most one tile of each expert is not full.
unsigned max_tiles(const Routes& routes, int pairs_of_tile) {
  const int pairs = routes.pairs();
  return static_cast<unsigned>(std::min(pairs, pairs / pairs_of_tile + routes.experts));
}

template <int kPairs>
constexpr std::size_t bytes_of_stages = kStages * sizeof(Stage<__half, kPairs>);

bool takes_many(const Routes& routes, const DeviceLimits& limits) {
  return routes.pairs() >= 16 * routes.experts &&
         bytes_of_stages<64> <= static_cast<std::size_t>(limits.shared_bytes);
}

template <class T, int kPairs>
cudaError_t launch_tiles(const DeviceLimits& limits, const ExpertProductArgs& args,
                         cudaStream_t stream) {
  const auto kernel = expert_tiles<T, kPairs>;
  if (const cudaError_t error = allow_shared_memory(kernel, limits)) return error;
  return launch(limits, kernel,
                {.grid = dim3(static_cast<unsigned>((args.n + kColumns - 1) / kColumns),
                              max_tiles(args.routes, kPairs)),
                 .block = dim3(kThreads),
                 .shared_bytes = bytes_of_stages<kPairs>,
                 .stream = stream},
                args);
}

}  // namespace

cudaError_t route(const RouteArgs& args, cudaStream_t stream) {
  if (!valid(args.routes) || args.hidden < 8 || args.hidden % 8 != 0 || args.hidden > kMaxHidden ||
      !args.x || !args.norm.gamma || !args.weight || !args.normed || !args.logits ||
      !aligned16(args.x) || !aligned16(args.norm.gamma) || !aligned16(args.weight) ||
      !aligned16(args.normed))
    return cudaErrorInvalidValue;
  DeviceLimits limits;
  if (const cudaError_t error = device_limits(limits)) return error;
  const int tokens = args.routes.tokens;
  const bool few = tokens <= kFewTokens;
  const auto blocks = [](int all, int each) {
    return static_cast<unsigned>((all + each - 1) / each);
  };
  const Launch where{.grid = dim3(static_cast<unsigned>(tokens),
                                  few ? blocks(args.routes.experts, kRouteWarps) : 1),
                     .block = dim3(kRouteThreads),
                     .shared_bytes = static_cast<std::size_t>(args.hidden) * sizeof(float),
                     .stream = stream};
  cudaError_t error = with_type(
      args.type, [&]<class T>(T) { return launch(limits, logits_kernel<T>, where, args); });
  const Launch one{dim3(1), dim3(kMaxExperts), 0, stream};
  if (error == cudaSuccess && few) return launch(limits, group_kernel<true>, one, args);
  if (error == cudaSuccess)
    error = launch(limits, choose_kernel,
                   {dim3(blocks(tokens, kRouteWarps)), dim3(kRouteThreads), 0, stream}, args);
  return error == cudaSuccess ? launch(limits, group_kernel<false>, one, args) : error;
}

LaunchPlan expert_product_plan(const Routes& routes, int n, const DeviceLimits& limits) {
  const bool many = takes_many(routes, limits);
  const std::size_t bytes = many ? bytes_of_stages<64> : bytes_of_stages<16>;
  const auto blocks =
      std::int64_t{(n + kColumns - 1) / kColumns} * max_tiles(routes, many ? 64 : 16);
  return {.blocks = static_cast<int>(std::min<std::int64_t>(blocks, 0x7fff'ffff)),
          .stages = kStages,
          .shared_bytes = bytes};
}

cudaError_t expert_product(const ExpertProductArgs& args, cudaStream_t stream) {
  if (!valid(args.routes) || args.n < 1 || args.k < 8 || args.k % 8 != 0 || args.n % 8 != 0 ||
      !args.weight || !args.x || (args.y == nullptr) == (args.y_float == nullptr) ||
      !aligned16(args.weight) || !aligned16(args.x))
    return cudaErrorInvalidValue;
  DeviceLimits limits;
  if (const cudaError_t error = device_limits(limits)) return error;
  if (args.type == KVLAB_F32)
    return launch(limits, expert_plain,
                  {.grid = dim3(static_cast<unsigned>((args.n + kWarps - 1) / kWarps),
                                max_tiles(args.routes, kPlainPairs)),
                   .block = dim3(kThreads),
                   .stream = stream},
                  args);
  // Uses tiles of 64 pairs if the experts have enough pairs to fill these tiles well.
  const bool many = takes_many(args.routes, limits);
  const auto launch_type = [&]<class T>(T) {
    return many ? launch_tiles<T, 64>(limits, args, stream)
                : launch_tiles<T, 16>(limits, args, stream);
  };
  return args.type == KVLAB_BF16 ? launch_type(__nv_bfloat16{}) : launch_type(__half{});
}

cudaError_t add_shares(const Routes& routes, const float* y, int hidden, float* x,
                       cudaStream_t stream) {
  if (!valid(routes) || hidden < 8 || hidden % 8 != 0 || !y || !x || !aligned16(y) || !aligned16(x))
    return cudaErrorInvalidValue;
  DeviceLimits limits;
  if (const cudaError_t error = device_limits(limits)) return error;
  const int each = kThreads * 8;
  return launch(limits, add_shares_kernel,
                {.grid = dim3(static_cast<unsigned>(routes.tokens),
                              static_cast<unsigned>((hidden + each - 1) / each)),
                 .block = dim3(kThreads),
                 .stream = stream},
                routes, y, hidden, x);
}

}  // namespace kvlab::kernels
