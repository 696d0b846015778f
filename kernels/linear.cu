// A few rows by a weight matrix that is read once: bound by memory, so built around the reading.
//
// Bytes that must move: n * k weights (twice that where gated); x, gamma and y are at most a few
// percent. Each block runs through units of kTiles * 8 outputs, its eight warps sharing k in runs
// of 128. A warp keeps kStages stages of 2 KB of weights on their way to shared memory, across
// units and from before the predecessor's end, so that the memory never waits for the arithmetic.
// That is done by tensor cores: a tile of 8 weight rows is the right operand of m16n8k16, and the
// left one has 16 rows, eight for the rows of x rounded to T and eight for what the rounding left:
// so a normed x counts to about 16 bits, and eight rows cost what one does. Sums have one order
// whatever the rows, tiles and card: equal inputs give equal bits, alone or in a batch.
#include <algorithm>
#include <cstddef>

#include "kernels/device/grid_dependency.cuh"
#include "kernels/device/tensor_core.cuh"
#include "kernels/launch.cuh"
#include "kernels/linear_f32.cuh"
#include "kernels/linear_run.cuh"

namespace kvlab::kernels {
namespace {

constexpr int kTileRows = 8;  // weight rows of a tile, and rows of x
constexpr int kStep = 32;     // k of a 16-byte load by each of a row's four lanes
constexpr int kRunSteps = 4;  // steps of k that a warp takes at a time, 128
constexpr int kStages = 4;
constexpr int kLoadBytes = kWarpSize * 16;  // one load of all lanes: eight weight rows by one step

/// How a stage of four loads is cut, and where everything lies in shared memory.
template <int kTiles, bool kNorm>
struct Layout {
  static constexpr int kSteps = kRunSteps / kTiles;  // of one stage
  static constexpr int kPartial = kTileRows * kTileRows;

  /// x that is not normed comes with the weights: rows * 64 bytes a step.
  __host__ __device__ static constexpr int stage_bytes(int rows) {
    return kRunSteps * kLoadBytes + (kNorm ? 0 : kSteps * rows * kStep * 2);
  }
  __host__ __device__ static constexpr int ring_bytes(int rows) {
    return kStages * stage_bytes(rows);
  }
  /// Partial sums of all warps, for two units by turns.
  static constexpr int kPartialBytes = 2 * kLinearWarps * kTiles * kPartial * sizeof(float);

  __host__ __device__ static constexpr std::size_t shared_bytes(int rows, int k) {
    return static_cast<std::size_t>(kLinearWarps * ring_bytes(rows) + kPartialBytes) +
           (kNorm ? static_cast<std::size_t>(rows) * normed_row_bytes(k) : 0);
  }
};

/// A warp's way through its stages of all the block's units.
template <int kTiles>
struct Cursor {
  int unit, k, stage = 0;
  __device__ Cursor(int unit_, int k_) : unit(unit_), k(k_) {}
  __device__ void advance(int first, int end) {
    k += kRunSteps / kTiles * kStep;
    if (++stage < kTiles) return;
    stage = 0;
    k += (kLinearWarps - 1) * kRunSteps * kStep;
    if (k < end) return;
    k = first;
    unit += static_cast<int>(gridDim.x);
  }
};

/// Eight floats to eight rounded ones and, 16 bytes on, what the rounding left.
template <class T>
struct SplitEight {
  __device__ void operator()(const float (&value)[8], float* to) const {
    uint4 packed[2];
    std::uint32_t* const high = &packed[0].x;
    std::uint32_t* const low = &packed[1].x;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float a = value[2 * i], b = value[2 * i + 1];
      high[i] = pack<T>(a, b);
      low[i] = pack<T>(a - to_float(from_float<T>(a)), b - to_float(from_float<T>(b)));
    }
    reinterpret_cast<uint4*>(to)[0] = packed[0];
    reinterpret_cast<uint4*>(to)[1] = packed[1];
  }
};

template <class T, int kTiles, bool kNorm, bool kGated>
__global__ void __launch_bounds__(kLinearThreads, 2) linear_kernel(const LinearRun<T> run) {
  using L = Layout<kTiles, kNorm>;
  extern __shared__ __align__(16) std::byte shared[];
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int tile_row = lane / 4;    // of weights, and of x
  const int lane_k = lane % 4 * 8;  // within a step
  const bool has_x = tile_row < run.rows;
  constexpr int kOutputs = kTiles * kTileRows / (kGated ? 2 : 1);  // of a unit
  const int units = (run.n + kOutputs - 1) / kOutputs;
  const int first_k = warp * kRunSteps * kStep;

  std::byte* const ring = shared + warp * L::ring_bytes(run.rows);
  float* const partials = reinterpret_cast<float*>(shared + kLinearWarps * L::ring_bytes(run.rows));
  std::byte* const normed = reinterpret_cast<std::byte*>(partials) + L::kPartialBytes;

  // Where a lane's 16 bytes of a stage lie.
  const auto weight_at = [&](int slot, int load) {
    return ring + slot * L::stage_bytes(run.rows) + load * kLoadBytes + lane * 16;
  };
  const auto x_at = [&](int slot, int step) {
    return ring + slot * L::stage_bytes(run.rows) + kRunSteps * kLoadBytes +
           step * run.rows * kStep * 2 + lane * 16;
  };
  const auto fetch_weights = [&](const Cursor<kTiles>& at, int slot) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const T* const matrix = kGated && tile % 2 ? run.up : run.weight;
      const int n = at.unit * kOutputs + (kGated ? tile / 2 : tile) * kTileRows + tile_row;
      const T* const row = matrix + static_cast<std::size_t>(n) * run.k;
#pragma unroll
      for (int step = 0; step < L::kSteps; ++step) {
        const int k = at.k + step * kStep + lane_k;
        const bool inside = at.unit < units && n < run.n && k < run.k;
        copy_async(shared_address(weight_at(slot, tile * L::kSteps + step)),
                   inside ? row + k : matrix, inside);
      }
    }
  };
  const T* const x_row =
      kNorm ? nullptr : static_cast<const T*>(run.x) + static_cast<std::size_t>(tile_row) * run.k;

  let_successor_start();
  // Weights do not depend on the predecessor.
  Cursor<kTiles> ahead(first_k < run.k ? static_cast<int>(blockIdx.x) : units, first_k);
  Cursor<kTiles> at = ahead;
#pragma unroll
  for (int slot = 0; slot < kStages; ++slot) {
    fetch_weights(ahead, slot);
    commit_copies();
    ahead.advance(first_k, run.k);
  }
  wait_for_predecessor();
  if constexpr (kNorm) {
    norm_rows(run, normed, partials, SplitEight<T>{});
  } else {
    Cursor<kTiles> of_x = at;
#pragma unroll
    for (int slot = 0; slot < kStages; ++slot) {
#pragma unroll
      for (int step = 0; step < L::kSteps; ++step) {
        const int k = of_x.k + step * kStep + lane_k;
        if (has_x)
          *reinterpret_cast<uint4*>(x_at(slot, step)) =
              k < run.k ? *reinterpret_cast<const uint4*>(x_row + k) : uint4{};
      }
      of_x.advance(first_k, run.k);
    }
  }

  int slot = 0, turn = 0;
  for (int unit = static_cast<int>(blockIdx.x); unit < units; unit += static_cast<int>(gridDim.x)) {
    float sums[kTiles][4] = {};
    while (at.unit == unit) {
      wait_copies<kStages - 1>();
      uint4 weights[kRunSteps], high[L::kSteps], low[L::kSteps];
#pragma unroll
      for (int load = 0; load < kRunSteps; ++load)
        weights[load] = *reinterpret_cast<const uint4*>(weight_at(slot, load));
#pragma unroll
      for (int step = 0; step < L::kSteps; ++step) {
        const int k = at.k + step * kStep + lane_k;
        high[step] = low[step] = uint4{};
        if constexpr (kNorm) {
          if (has_x && k < run.k) {
            const uint4* const x = reinterpret_cast<const uint4*>(
                normed + static_cast<std::size_t>(tile_row) * normed_row_bytes(run.k) +
                static_cast<std::size_t>(k) * sizeof(float));
            high[step] = x[0];
            low[step] = x[1];
          }
        } else if (has_x) {
          high[step] = *reinterpret_cast<const uint4*>(x_at(slot, step));
        }
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int step = 0; step < L::kSteps; ++step) {
          const uint4& w = weights[tile * L::kSteps + step];
          multiply_add<T>(sums[tile], {high[step].x, low[step].x, high[step].y, low[step].y}, w.x,
                          w.y);
          multiply_add<T>(sums[tile], {high[step].z, low[step].z, high[step].w, low[step].w}, w.z,
                          w.w);
        }
      fetch_weights(ahead, slot);
      if constexpr (!kNorm) {
#pragma unroll
        for (int step = 0; step < L::kSteps; ++step) {
          const int k = ahead.k + step * kStep + lane_k;
          const bool inside = ahead.unit < units && k < run.k;
          if (has_x)
            copy_async(shared_address(x_at(slot, step)), inside ? x_row + k : x_row, inside);
        }
      }
      commit_copies();
      ahead.advance(first_k, run.k);
      at.advance(first_k, run.k);
      slot = slot + 1 == kStages ? 0 : slot + 1;
    }

    // [warp, tile, row of x, output]: the warps' shares of k, added in order.
    float* const partial = partials + turn * kLinearWarps * kTiles * L::kPartial;
    if (has_x) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
        *reinterpret_cast<float2*>(partial + (warp * kTiles + tile) * L::kPartial +
                                   tile_row * kTileRows + lane % 4 * 2) =
            float2{sums[tile][0] + sums[tile][2], sums[tile][1] + sums[tile][3]};
    }
    __syncthreads();
    const auto total = [&](int tile, int row, int column) {
      float sum = 0;
#pragma unroll
      for (int w = 0; w < kLinearWarps; ++w)
        sum += partial[(w * kTiles + tile) * L::kPartial + row * kTileRows + column];
      return sum;
    };
    const int row = static_cast<int>(threadIdx.x) / kOutputs;
    const int output = static_cast<int>(threadIdx.x) % kOutputs, n = unit * kOutputs + output;
    if (row < run.rows && n < run.n) {
      const int tile = output / kTileRows, column = output % kTileRows;
      const float value =
          kGated ? silu(total(2 * tile, row, column)) * total(2 * tile + 1, row, column)
                 : total(tile, row, column);
      write_output(run, row, n, value);
    }
    turn ^= 1;
  }
}

/// Rows that the norm leaves room for; 0: not even one.
template <int kTiles, bool kNorm>
int rows_that_fit(int rows, int k, int shared_bytes) {
  while (rows > 0 &&
         Layout<kTiles, kNorm>::shared_bytes(rows, k) > static_cast<std::size_t>(shared_bytes))
    --rows;
  return rows;
}

template <class T, int kTiles, bool kNorm, bool kGated>
cudaError_t launch_tiles(LinearRun<T> run, const DeviceLimits& limits, cudaStream_t stream) {
  const int fit = rows_that_fit<kTiles, kNorm>(run.rows, run.k, limits.shared_bytes);
  if (fit == 0) return cudaErrorInvalidValue;
  const int passes = (run.rows + fit - 1) / fit, rows = run.rows;
  const int each = (rows + passes - 1) / passes;
  const std::size_t shared_bytes = Layout<kTiles, kNorm>::shared_bytes(each, run.k);
  const auto kernel = linear_kernel<T, kTiles, kNorm, kGated>;
  cudaError_t error = allow_shared_memory(kernel, limits);
  constexpr int kOutputs = kTiles * kTileRows / (kGated ? 2 : 1);
  const int units = (run.n + kOutputs - 1) / kOutputs;
  const Launch where{.grid = dim3(static_cast<unsigned>(std::min(units, limits.multiprocessors))),
                     .block = dim3(kLinearThreads),
                     .shared_bytes = shared_bytes,
                     .stream = stream};
  for (int done = 0; done < rows && error == cudaSuccess; done += each) {
    run.rows = std::min(each, rows - done);
    error = launch(limits, kernel, where, run);
    const std::size_t step = static_cast<std::size_t>(each);
    const std::size_t n = static_cast<std::size_t>(run.n), k = static_cast<std::size_t>(run.k);
    run.x = static_cast<const std::byte*>(run.x) + step * k * (kNorm ? sizeof(float) : sizeof(T));
    if (run.y) run.y += step * n;
    if (run.y_float) run.y_float += step * n;
    if (run.residual) run.residual += step * n;
  }
  return error;
}

/// What a unit size costs the busiest multiprocessor: weight rows and, from the L2 cache, rows of
/// x.
int cost(const DeviceLimits& limits, int weight_rows, int tiles, int rows) {
  const int units = (weight_rows + tiles * kTileRows - 1) / (tiles * kTileRows);
  const int turns = (units + limits.multiprocessors - 1) / limits.multiprocessors;
  return turns * (tiles * kTileRows + rows);
}

template <class T, bool kNorm>
cudaError_t launch_linear(const LinearRun<T>& run, cudaStream_t stream) {
  DeviceLimits limits;
  if (const cudaError_t error = device_limits(limits); error != cudaSuccess) return error;
  const int one = cost(limits, run.n, 1, run.rows), two = cost(limits, run.n, 2, run.rows),
            four = cost(limits, run.n, 4, run.rows);
  if (four <= std::min(one, two)) return launch_tiles<T, 4, kNorm, false>(run, limits, stream);
  if (two <= one) return launch_tiles<T, 2, kNorm, false>(run, limits, stream);
  return launch_tiles<T, 1, kNorm, false>(run, limits, stream);
}

template <class T>
cudaError_t launch_gated(const LinearRun<T>& run, cudaStream_t stream) {
  DeviceLimits limits;
  if (const cudaError_t error = device_limits(limits); error != cudaSuccess) return error;
  if (cost(limits, 2 * run.n, 4, run.rows) <= cost(limits, 2 * run.n, 2, run.rows))
    return launch_tiles<T, 4, true, true>(run, limits, stream);
  return launch_tiles<T, 2, true, true>(run, limits, stream);
}

bool valid(int rows, int n, int k) {
  return rows > 0 && rows <= kMostLinearRows && n > 0 && k > 0 && k % 8 == 0;
}

template <class T>
LinearRun<T> run_of(const LinearArgs& args) {
  return {.rows = args.rows,
          .n = args.n,
          .k = args.k,
          .weight = static_cast<const T*>(args.weight),
          .up = nullptr,
          .x = args.x,
          .gamma = static_cast<const T*>(args.gamma),
          .norm_epsilon = args.norm_epsilon,
          .bias = static_cast<const T*>(args.bias),
          .y = static_cast<T*>(args.y),
          .y_float = args.y_float,
          .residual = args.residual};
}

template <class T>
LinearRun<T> run_of(const GatedLinearArgs& args) {
  return {.rows = args.rows,
          .n = args.n,
          .k = args.k,
          .weight = static_cast<const T*>(args.gate),
          .up = static_cast<const T*>(args.up),
          .x = args.x,
          .gamma = static_cast<const T*>(args.gamma),
          .norm_epsilon = args.norm_epsilon,
          .bias = nullptr,
          .y = static_cast<T*>(args.y),
          .y_float = nullptr,
          .residual = nullptr};
}

template <class T>
cudaError_t linear_of(const LinearArgs& args, cudaStream_t stream) {
  return args.gamma ? launch_linear<T, true>(run_of<T>(args), stream)
                    : launch_linear<T, false>(run_of<T>(args), stream);
}

}  // namespace

cudaError_t linear(const LinearArgs& args, cudaStream_t stream) {
  const int outputs = (args.y != nullptr) + (args.y_float != nullptr) + (args.residual != nullptr);
  if (!valid(args.rows, args.n, args.k) || outputs != 1 || !args.weight || !args.x ||
      !aligned16(args.weight) || !aligned16(args.x) || !aligned16(args.gamma))
    return cudaErrorInvalidValue;
  switch (args.type) {
    case Type::bf16:
      return linear_of<__nv_bfloat16>(args, stream);
    case Type::f16:
      return linear_of<__half>(args, stream);
    case Type::f32:
      return launch_linear_f32(run_of<float>(args), stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t gated_linear(const GatedLinearArgs& args, cudaStream_t stream) {
  if (!valid(args.rows, args.n, args.k) || !args.gate || !args.up || !args.x || !args.gamma ||
      !args.y || !aligned16(args.gate) || !aligned16(args.up) || !aligned16(args.x) ||
      !aligned16(args.gamma))
    return cudaErrorInvalidValue;
  switch (args.type) {
    case Type::bf16:
      return launch_gated(run_of<__nv_bfloat16>(args), stream);
    case Type::f16:
      return launch_gated(run_of<__half>(args), stream);
    case Type::f32:
      return launch_linear_f32(run_of<float>(args), stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace kvlab::kernels
