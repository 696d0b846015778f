// Computes the outputs of sampled queries in all caches of a head task, and their errors relative
// to the full cache's outputs. An output is the sum of values times exponentials over the tokens
// that the cache keeps. Tensor cores compute it; the exponentials of all other tokens are masked to
// zero.
//
// A tile has four query heads and four configurations, which are the 16 rows of one product. Except
// for the mask, the exponentials are the same for all four configurations. They are split into two
// bf16 parts (16 bits of precision). Values that are not bf16 are also split into two bf16 parts.
#include <algorithm>

#include "kernels/device/fold.cuh"
#include "kernels/device/half_parts.cuh"
#include "kernels/device/load.cuh"
#include "kernels/device/store.cuh"
#include "kernels/launch_plans.hpp"
#include "kernels/replay/replay.hpp"

namespace kvlab::kernels {
namespace {

constexpr int kTokens = 64;          // per stage
constexpr int kDims = 128;           // per pass
constexpr int kTilesAtOnce = 10;     // per thread block
constexpr int kHalves = 2;           // warps per tile, which share the dimensions of a pass
constexpr int kColumns = kDims / 8;  // products of 8 dimensions
constexpr int kOwnColumns = kColumns / kHalves;
/// Limits of the number of stages in shared memory. The highest number that fits is used.
constexpr int kMaxStages = 3, kMinStages = 2;
constexpr int kThreads = kTilesAtOnce * kHalves * kWarpSize;
constexpr int kMinWarps = 4;  // so that each thread loads one couple of tokens: 2 kinds of rows x 2
                              // head groups x 32 couples
using Swizzle = Swizzled<kDims * 2>;

using Couple = Bf16Parts;  // one head's exponentials of two tokens

template <int kPlanes>
struct Stage {
  uint4 values[kPlanes][kTokens * kDims / 8];  // [token, dim] of bf16, swizzled
  Couple weights[2][2][kTokens / 2][4];        // [kind of row, head group, couple, head]
};

/// A sampled query of one head task.
struct Sampled {
  const ReplayOutputsArgs& args;
  int task, i, index;
  std::int64_t row;  ///< index among the block's queries of all head tasks
  __device__ int query() const { return args.rows.first + i; }
  __device__ std::int64_t sample(int config) const {
    return args.sets.sample_of(args.measured, args.sweep.cache_of(task, config), index);
  }
  __device__ std::int64_t kept_row(int config) const {
    return args.sets.kept_of(args.sweep.cache_of(task, config), index);
  }
};

/// Loads the values of tokens [first, first + kTokens), for dimensions from `dim` on. Called by the
/// whole thread block. Loads zeros for tokens after the query and for dimensions beyond the head
/// size.
template <int kPlanes>
__device__ void fill(Stage<kPlanes>& stage, const Sampled& at, int first, int dim) {
  const ReplayShape& shape = at.args.shape;
  const int tokens = at.query() + 1;
  for (int n = static_cast<int>(threadIdx.x); n < kTokens * kColumns;
       n += static_cast<int>(blockDim.x)) {
    const int token = n / kColumns, chunk = n % kColumns, d = dim + 8 * chunk;
    const bool wanted = first + token < tokens && d < shape.head_size;
    const std::int64_t from = shape.vector(at.task, first + token) + d;
    const int to = Swizzle::offset(token, chunk) / 16;
    if constexpr (kPlanes == 1) {
      copy_async(shared_address(&stage.values[0][to]),
                 static_cast<const __nv_bfloat16*>(at.args.values) + (wanted ? from : 0), wanted);
    } else {
      Couple two[4] = {};
      if (wanted)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const float2 x = load2(at.args.values, shape.type, from + 2 * c);
          two[c] = Couple::split(x.x, x.y);
        }
      stage.values[0][to] = {two[0].kept, two[1].kept, two[2].kept, two[3].kept};
      stage.values[1][to] = {two[0].left, two[1].left, two[2].left, two[3].left};
    }
  }
}

/// One thread's part of a stage's weights, while it is loaded from global memory.
struct Weights {
  float4 first, second;  ///< exponentials of two tokens
  Couple* to;            ///< null if this thread loads no part
};

/// Loads the weights. They are zero for tokens after the query.
template <int kPlanes>
__device__ Weights fetch_weights(Stage<kPlanes>& stage, const Sampled& at, int first) {
  const int head_groups = at.args.shape.head_groups(), tokens = at.query() + 1,
            kinds = at.args.cache_positions ? 2 : 1, n = static_cast<int>(threadIdx.x);
  Weights weights{};
  if (n >= kinds * head_groups * kTokens / 2) return weights;
  const int couple = n % (kTokens / 2), head_group = n / (kTokens / 2) % head_groups,
            kind = n / (kTokens / 2) / head_groups, token = first + 2 * couple;
  const float4* const e = (kind ? at.args.cache_positions : at.args.rows.e) +
                          (at.row * head_groups + head_group) * at.args.shape.tokens;
  if (token < tokens) weights.first = e[token];
  if (token + 1 < tokens) weights.second = e[token + 1];
  weights.to = stage.weights[kind][head_group][couple];
  return weights;
}
__device__ inline void store_weights(const Weights& weights) {
  if (!weights.to) return;
  weights.to[0] = Couple::split(weights.first.x, weights.second.x),
  weights.to[1] = Couple::split(weights.first.y, weights.second.y);
  weights.to[2] = Couple::split(weights.first.z, weights.second.z),
  weights.to[3] = Couple::split(weights.first.w, weights.second.w);
}

/// Converts two bits to masks of two bf16 numbers.
__device__ inline std::uint32_t mask_of(std::uint32_t bits) {
  return (bits & 1) * 0xffffu + (bits & 2) * 0x7fff8000u;
}

/// The bits of the tokens of a stage that two configurations keep, in words of 32 tokens.
struct StageBits {
  std::uint32_t words[2][kTokens / 32];
};
/// A warp's sums of squares for each row: of the error and of the output.
using TileErrors = double2[16];

/// A warp that computes the 16 rows of a tile for half of the dimensions of a pass. Lane l holds
/// rows g = l / 4 and g + 8. Both are head g % 4, of two configurations.
template <int kPlanes>
class Tile {
 public:
  __device__ Tile(const Sampled& at, int tile, int half)
      : at_(at),
        lane_(static_cast<int>(threadIdx.x) % kWarpSize),
        first_column_(half * kOwnColumns) {
#pragma unroll
    for (int n = 0; n < kOwnColumns / 2; ++n)
      offsets_[n] = static_cast<std::uint32_t>(
          Swizzle::offset(lane_ % 16, first_column_ + 2 * n + lane_ / 16));
    const ReplaySweep& sweep = at.args.sweep;
    const int tasks = sweep.config_tasks, tiles = tasks ? 1 : at.args.configs.tiles,
              head_groups = at.args.shape.head_groups();
    if (tile >= tiles * head_groups) return;
    head_group_ = tile % head_groups;
    const std::int32_t alone[kReplayTile] = {tasks ? at.task / tasks : -1, -1, -1, -1};
    const std::int32_t* const four =
        tasks ? alone : at.args.configs.indices + tile / head_groups * kReplayTile;
    cache_positions_ = sweep.rules[sweep.cache_of(at.task, four[0])].cache_positions ? 1 : 0;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      config_[n] = four[lane_ / 16 + 2 * n];
      if (config_[n] >= 0)
        words_[n] = at.args.sets.shared + at.kept_row(config_[n]) * at.args.shape.words();
    }
  }

  __device__ void clear() {
#pragma unroll
    for (auto& sum : sums_)
#pragma unroll
      for (float& x : sum) x = 0;
  }

  /// The bits for the stage that begins at token `first`.
  __device__ StageBits bits(int first) const {
    StageBits bits;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < kTokens / 32; ++i)
        bits.words[n][i] =
            words_[n] && first + 32 * i <= at_.query() ? words_[n][first / 32 + i] : 0;
    return bits;
  }

  /// Adds a stage's products for one pass. `dim`: the first dimension of the pass.
  __device__ void multiply(const Stage<kPlanes>& stage, const StageBits& bits, int dim) {
    if (head_group_ < 0 || dim + 8 * first_column_ >= at_.args.shape.head_size) return;
    const int t = lane_ % 4, head = lane_ / 4 % 4;
#pragma unroll
    for (int part = 0; part < kTokens / 32; ++part) {
      if (!__any_sync(~0u, bits.words[0][part] | bits.words[1][part])) continue;
#pragma unroll
      for (int step = 2 * part; step < 2 * part + 2; ++step) {
        const Couple low = stage.weights[cache_positions_][head_group_][8 * step + t][head],
                     high = stage.weights[cache_positions_][head_group_][8 * step + t + 4][head];
        std::uint32_t kept[4], left[4];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const std::uint32_t own = bits.words[n][part] >> (step % 2 * 16 + 2 * t);
          const std::uint32_t mask_low = mask_of(own), mask_high = mask_of(own >> 8);
          kept[n] = low.kept & mask_low, kept[n + 2] = high.kept & mask_high;
          left[n] = low.left & mask_low, left[n + 2] = high.left & mask_high;
        }
        multiply_step(stage, step, kept, left);
      }
    }
  }

  /// Stores the rows' outputs for the dimensions of the pass.
  __device__ void put(int dim) const {
    const ReplayShape& shape = at_.args.shape;
    const int tasks = at_.args.sweep.config_tasks;
    for_outputs(dim, [&](int n, int head, int d, float*, const ReplayKept&, const float2& out) {
      const std::int64_t token = std::int64_t{config_[n]} * shape.tokens + at_.query(),
                         to = (token * tasks + at_.task % tasks) * shape.group + head;
      store2(at_.args.outputs, shape.type, to * shape.head_size + d, out);
    });
  }

  /// Adds the errors in the dimensions of the pass to the rows' errors.
  __device__ void compare(int dim) {
    const ReplayShape& shape = at_.args.shape;
    for_outputs(dim, [&](int n, int head, int d, float* to, const ReplayKept& set,
                         const float2& out) {
      const float* const full = at_.args.full + (at_.row * shape.group + head) * shape.head_size;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const double wanted = full[d + c], got = c == 0 ? out.x : out.y;
        size_[n] += wanted * wanted;
        const double off = set.whole ? 0.0 : wanted - got;
        error_[n] += off * off;
        if (at_.args.stores_errors) to[c] = static_cast<float>(off);
      }
    });
  }

  /// Adds the errors that a tile's two warps have computed for each row, and writes the results.
  /// Called by the whole thread block.
  __device__ void write(TileErrors& shared) {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int distance = 1; distance < 4; distance *= 2) {
        error_[n] += __shfl_xor_sync(~0u, error_[n], distance);
        size_[n] += __shfl_xor_sync(~0u, size_[n], distance);
      }
    const bool writes = head_group_ >= 0 && lane_ % 4 == 0;
    const int row = lane_ / 4, head = 4 * head_group_ + row % 4;
    if (writes && first_column_ > 0)
      for (int n = 0; n < 2; ++n) shared[row + 8 * n] = {error_[n], size_[n]};
    __syncthreads();
    if (!writes || first_column_ > 0 || head >= at_.args.shape.group) return;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if (config_[n] < 0) continue;
      const double2 other = shared[row + 8 * n];
      at_.args.errors[at_.sample(config_[n]) * kMaxReplayGroup + head] = {error_[n] + other.x,
                                                                          size_[n] + other.y};
    }
  }

 private:
  /// Calls each(n, head, d, direct values of d, kept set, outputs of d and d + 1) for the n-th
  /// configuration and for this lane's dimensions d of the pass.
  template <class Each>
  __device__ void for_outputs(int dim, Each each) const {
    const ReplayShape& shape = at_.args.shape;
    const int head = 4 * head_group_ + lane_ / 4 % 4;
    if (head_group_ < 0 || head >= shape.group) return;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if (config_[n] < 0) continue;
      const ReplayKept& set = at_.args.sets.kept[at_.kept_row(config_[n])];
      float* const direct =
          at_.args.sets.values + (at_.sample(config_[n]) * shape.group + head) * shape.head_size;
      const float over = 1 / set.sums[head];
#pragma unroll
      for (int column = 0; column < kOwnColumns; ++column) {
        const int d = dim + 8 * (first_column_ + column) + 2 * (lane_ % 4);
        if (d >= shape.head_size) continue;
        float2 sum{sums_[column][2 * n], sums_[column][2 * n + 1]};
        if (set.direct) sum.x += direct[d], sum.y += direct[d + 1];
        each(n, head, d, direct + d, set, float2{sum.x * over, sum.y * over});
      }
    }
  }
  /// Multiplies the weights of 16 tokens by their values, for the warp's dimensions of the pass.
  __device__ void multiply_step(const Stage<kPlanes>& stage, int step,
                                const std::uint32_t (&kept)[4], const std::uint32_t (&left)[4]) {
    constexpr int kStepBytes = 16 * 2 * kDims;
    static_assert(Swizzle::offset(16, 1) == kStepBytes + Swizzle::offset(0, 1));
    std::uint32_t b[kPlanes][kOwnColumns / 2][4];
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane)
#pragma unroll
      for (int n = 0; n < kOwnColumns / 2; ++n)
        load_matrices_transposed(b[plane][n], shared_address(&stage.values[plane][0]) +
                                                  static_cast<unsigned>(step * kStepBytes) +
                                                  offsets_[n]);
    if constexpr (kPlanes == 2) add(kept, b[1]);
    add(left, b[0]);
    add(kept, b[0]);
  }
  __device__ void add(const std::uint32_t (&weights)[4],
                      const std::uint32_t (&values)[kOwnColumns / 2][4]) {
#pragma unroll
    for (int n = 0; n < kOwnColumns; ++n)
      multiply_add<__nv_bfloat16>(sums_[n], weights, values[n / 2][n % 2 * 2],
                                  values[n / 2][n % 2 * 2 + 1]);
  }

  const Sampled& at_;
  const int lane_, first_column_;
  int head_group_ = -1, cache_positions_ = 0;
  std::int32_t config_[2] = {-1, -1};
  const std::uint32_t* words_[2] = {};
  std::uint32_t
      offsets_[kOwnColumns / 2];  ///< offsets of the matrices that hold the values of a step
  float sums_[kOwnColumns][4];
  double error_[2] = {}, size_[2] = {};
};

/// Uses one thread block for each sampled query (x), up to kTilesAtOnce tiles (y), and head task
/// (z). The block has two warps for each tile.
template <int kPlanes, int kStages>
__global__ void __launch_bounds__(kThreads)
    outputs_kernel(const __grid_constant__ ReplayOutputsArgs args) {
  extern __shared__ __align__(16) std::byte dynamic[];
  __shared__ TileErrors errors[kTilesAtOnce];
  auto* const stages = reinterpret_cast<Stage<kPlanes>*>(dynamic);
  const int i = static_cast<int>(blockIdx.x), query = args.rows.first + i,
            index = args.measured.index[query], task = static_cast<int>(blockIdx.z),
            warp = static_cast<int>(threadIdx.x) / kWarpSize,
            tiles = static_cast<int>(blockDim.x) / (kWarpSize * kHalves);
  if (!args.measured.samples(index)) return;
  if (args.sweep.config_tasks && args.sweep.is_quantized(task, 0)) return;
  const Sampled at{args, task, i, index, args.rows.row(task, i)};
  Tile<kPlanes> tile(at, static_cast<int>(blockIdx.y) * tiles + warp / kHalves, warp % kHalves);
  for (int dim = 0; dim < args.shape.head_size; dim += kDims) {
    tile.clear();
    for (int s = 0; s < kStages - 1; ++s) {
      fill(stages[s], at, s * kTokens, dim);
      commit_copies();
      store_weights(fetch_weights(stages[s], at, s * kTokens));
    }
    StageBits bits = tile.bits(0);
    for (int first = 0, s = 0; first <= query; first += kTokens, s = (s + 1) % kStages) {
      wait_copies<kStages - 2>();
      __syncthreads();  // this stage has arrived, and the previous one can be overwritten
      const int ahead = first + (kStages - 1) * kTokens;
      Stage<kPlanes>& free = stages[(s + kStages - 1) % kStages];
      if (ahead <= query) fill(free, at, ahead, dim);
      commit_copies();
      const Weights next = ahead <= query ? fetch_weights(free, at, ahead) : Weights{};
      const StageBits next_bits = tile.bits(first + kTokens);
      tile.multiply(stages[s], bits, dim);
      store_weights(next);
      bits = next_bits;
    }
    wait_copies<0>();
    __syncthreads();
    if (args.outputs)
      tile.put(dim);
    else
      tile.compare(dim);
  }
  if (!args.outputs) tile.write(errors[warp / kHalves]);
}

template <int kPlanes, int kStages>
cudaError_t multiply(const ReplayOutputsArgs& args, cudaStream_t stream) {
  constexpr int kBytes = kStages * sizeof(Stage<kPlanes>);
  const auto kernel = outputs_kernel<kPlanes, kStages>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  const int tiles = (args.sweep.config_tasks ? 1 : args.configs.tiles) * args.shape.head_groups(),
            groups = (tiles + kTilesAtOnce - 1) / kTilesAtOnce,
            warps = std::max(kHalves * ((tiles + groups - 1) / groups), kMinWarps);
  kernel<<<grid_of(args.rows.count, groups, args.shape.tasks), warps * kWarpSize, kBytes, stream>>>(
      args);
  return cudaGetLastError();
}

}  // namespace

LaunchPlan replay_outputs_plan(Type type, const DeviceLimits& limits) {
  const std::size_t stage = type == KVLAB_BF16 ? sizeof(Stage<1>) : sizeof(Stage<2>),
                    beside = kTilesAtOnce * sizeof(TileErrors);
  const auto bytes = [&](int stages) { return static_cast<std::size_t>(stages) * stage + beside; };
  int stages = kMaxStages;
  while (stages >= kMinStages && bytes(stages) > static_cast<std::size_t>(limits.shared_bytes))
    --stages;
  const bool fits = stages >= kMinStages;
  return {
      .blocks = fits ? 1 : 0, .stages = stages, .shared_bytes = bytes(fits ? stages : kMinStages)};
}

cudaError_t replay_outputs(const ReplayOutputsArgs& args, cudaStream_t stream) {
  const ReplaySets& configs = args.configs;
  if (configs.tiles + configs.quantized_tiles < 1 || !args.shape.is_launchable())
    return cudaErrorInvalidValue;
  DeviceLimits limits;
  cudaError_t error = device_limits(limits);
  if (error != cudaSuccess) return error;
  const LaunchPlan plan = replay_outputs_plan(args.shape.type, limits);
  if (!plan.fits()) return cudaErrorNotSupported;
  if (configs.tiles > 0)
    error = args.shape.type == KVLAB_BF16 ? multiply<1, kMaxStages>(args, stream)
            : plan.stages == kMaxStages   ? multiply<2, kMaxStages>(args, stream)
                                          : multiply<2, kMinStages>(args, stream);
  if (error != cudaSuccess || configs.quantized_tiles == 0) return error;
  ReplayOutputsArgs quantized = args;
  quantized.configs = configs.quantized_only();
  return replay_quantized_outputs(quantized, stream);
}

}  // namespace kvlab::kernels
