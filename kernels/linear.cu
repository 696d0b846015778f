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
constexpr int kTiles = 2;     // of a unit; of the gate and of up where gated
constexpr int kStep = 32;     // k of a 16-byte load by each of a row's four lanes
constexpr int kSteps = 4;     // of a stage
constexpr int kRun = kSteps * kStep;
constexpr int kStages = 4;
constexpr int kRuns = (kStages + kTiles - 1) / kTiles;  // on their way at once
constexpr int kLoadBytes = kWarpSize * 16;
constexpr int kStageBytes = kSteps * kLoadBytes;
constexpr int kRingBytes = kStages * kStageBytes;  // of a warp
constexpr int kPartial = kTileRows * kTileRows;    // sums of a tile

/// Partial sums of all warps, for two units by turns.
constexpr int kPartialBytes =
    2 * kLinearWarps * kTiles * kPartial * static_cast<int>(sizeof(float));

/// Of one row of x over a run.
constexpr int kXRowBytes = kRun * 2;

/// Dynamic shared memory: the weights' rings, partial sums, then what the norm needs, or the warps'
/// rings of x.
template <class T, bool kNorm>
std::size_t shared_bytes(int rows, int k) {
  const int x_bytes = kLinearWarps * kRuns * rows * kXRowBytes;
  return static_cast<std::size_t>(kLinearWarps * kRingBytes + kPartialBytes) +
         (kNorm ? norm_bytes<T>(rows, k) : static_cast<std::size_t>(x_bytes));
}

/// A warp's way through its runs of k in all the block's units, tile by tile.
struct Cursor {
  int unit, k, tile = 0;
  __device__ Cursor(int unit_, int k_) : unit(unit_), k(k_) {}
  __device__ void advance(int first_k, int end_k) {
    if (++tile < kTiles) return;
    tile = 0;
    k += kLinearWarps * kRun;
    if (k < end_k) return;
    k = first_k;
    unit += static_cast<int>(gridDim.x);
  }
};

constexpr int outputs_of_unit(bool gated) { return kTiles * kTileRows / (gated ? 2 : 1); }

/// A slot's successor in a ring.
template <int kSlots>
__device__ inline int after(int slot) {
  return slot + 1 == kSlots ? 0 : slot + 1;
}

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

/// A lane's part of x over a run: rounded to T, and what the rounding left.
struct XRun {
  uint4 high[kSteps], low[kSteps];
};

/// What one warp reads. Each lane copies to shared memory just what it will use itself, so that
/// there is nothing to wait for but the copies.
template <class T, bool kNorm, bool kGated>
class WarpStream {
 public:
  __device__ WarpStream(const LinearRun<T>& run, std::byte* shared)
      : run_(run),
        tile_row_(lane() / 4),
        lane_k_(lane() % 4 * 8),
        first_k_(warp() * kRun),
        units_((run.n + outputs_of_unit(kGated) - 1) / outputs_of_unit(kGated)),
        ring_(shared + warp() * kRingBytes + lane() * 16),
        normed_(shared + kLinearWarps * kRingBytes + kPartialBytes +
                (kNorm ? gamma_bytes<T>(run.k) : 0)),
        x_ring_(normed_ + warp() * kRuns * run.rows * kXRowBytes + lane() * 16),
        ahead_(first_k_ < run.k ? static_cast<int>(blockIdx.x) : units_, first_k_) {}

  __device__ static int warp() { return static_cast<int>(threadIdx.x) / kWarpSize; }
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % kWarpSize; }
  __device__ int units() const { return units_; }
  __device__ int first_k() const { return first_k_; }
  __device__ bool has_x() const { return tile_row_ < run_.rows; }

  /// Weights of the first stages. They do not depend on the predecessor.
  __device__ void start_weights() {
#pragma unroll 1
    for (int stage = 0; stage < kStages; ++stage) {
      fetch_weights(stage);
      commit_copies();
      ahead_.advance(first_k_, run_.k);
    }
  }
  /// x, unnormed, of the first stages: by plain loads, since their groups of copies are complete.
  __device__ void start_x() {
    int k = first_k_;
#pragma unroll 1
    for (int slot = 0; slot < kRuns; ++slot) {
      if (has_x()) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          const int at = k + step * kStep + lane_k_;
          *x_slot(slot, step) =
              at < run_.k ? *reinterpret_cast<const uint4*>(x_row() + at) : uint4{};
        }
      }
      k += kLinearWarps * kRun;
      if (k >= run_.k) k = first_k_;
    }
  }

  /// The run of x that the next stage belongs to. Its copies must be complete.
  __device__ XRun read_x(int first) {
    XRun x{};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int k = first + step * kStep + lane_k_;
      if constexpr (kNorm) {
        const uint4* const from = reinterpret_cast<const uint4*>(
            normed_ + static_cast<std::size_t>(tile_row_) * normed_row_bytes(run_.k) +
            static_cast<std::size_t>(k) * sizeof(float));
        if (has_x() && k < run_.k) x.high[step] = from[0], x.low[step] = from[1];
      } else {
        if (has_x()) x.high[step] = *x_slot(x_read_, step);
      }
    }
    x_read_ = after<kRuns>(x_read_);
    return x;
  }
  __device__ void read_weights(uint4 (&weights)[kSteps]) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      weights[step] = *reinterpret_cast<const uint4*>(slot(slot_, step));
  }
  /// Sends for another stage in place of the one that has been read.
  __device__ void fetch() {
    fetch_weights(slot_);
    if (!kNorm && ahead_.tile == 0) fetch_x();
    commit_copies();
    ahead_.advance(first_k_, run_.k);
    slot_ = after<kStages>(slot_);
  }

 private:
  __device__ std::byte* slot(int stage, int step) const {
    return ring_ + stage * kStageBytes + step * kLoadBytes;
  }
  __device__ uint4* x_slot(int run, int step) const {
    return reinterpret_cast<uint4*>(x_ring_ + run * run_.rows * kXRowBytes +
                                    step * run_.rows * kStep * 2);
  }
  __device__ const T* x_row() const {
    return static_cast<const T*>(run_.x) + static_cast<std::size_t>(tile_row_) * run_.k;
  }

  __device__ void fetch_weights(int stage) const {
    const T* const matrix = kGated && ahead_.tile % 2 ? run_.up : run_.weight;
    const int n =
        ahead_.unit * outputs_of_unit(kGated) + (kGated ? 0 : ahead_.tile * kTileRows) + tile_row_;
    const T* const row = matrix + static_cast<std::size_t>(n) * run_.k;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int k = ahead_.k + step * kStep + lane_k_;
      const bool inside = ahead_.unit < units_ && n < run_.n && k < run_.k;
      copy_async(shared_address(slot(stage, step)), inside ? row + k : matrix, inside);
    }
  }
  __device__ void fetch_x() {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int k = ahead_.k + step * kStep + lane_k_;
      const bool inside = ahead_.unit < units_ && k < run_.k;
      if (has_x())
        copy_async(shared_address(x_slot(x_fetched_, step)), inside ? x_row() + k : x_row(),
                   inside);
    }
    x_fetched_ = after<kRuns>(x_fetched_);
  }

  const LinearRun<T>& run_;
  int tile_row_;  ///< of weights, and of x
  int lane_k_;    ///< within a step
  int first_k_, units_;
  std::byte *ring_, *normed_, *x_ring_;
  Cursor ahead_;
  int slot_ = 0, x_read_ = 0, x_fetched_ = 0;
};

/// Adds the warps' shares of k in their order and writes a unit. `partial`: [warp, tile, row of x,
/// output].
template <class T, bool kGated>
__device__ void finish_unit(const LinearRun<T>& run, int unit, const float* partial) {
  constexpr int kOutputs = outputs_of_unit(kGated);
  const int row = static_cast<int>(threadIdx.x) / kOutputs;
  const int output = static_cast<int>(threadIdx.x) % kOutputs, n = unit * kOutputs + output;
  if (row >= run.rows || n >= run.n) return;
  const auto total = [&](int tile, int column) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kLinearWarps; ++w)
      sum += partial[(w * kTiles + tile) * kPartial + row * kTileRows + column];
    return sum;
  };
  const float value = kGated ? silu(total(0, output)) * total(1, output)
                             : total(output / kTileRows, output % kTileRows);
  write_output(run, row, n, value);
}

template <class T, bool kNorm, bool kGated>
__global__ void __launch_bounds__(kLinearThreads) linear_kernel(const LinearRun<T> run) {
  extern __shared__ __align__(16) std::byte shared[];
  float* const partials = reinterpret_cast<float*>(shared + kLinearWarps * kRingBytes);
  WarpStream<T, kNorm, kGated> stream(run, shared);
  std::byte* const norm = shared + kLinearWarps * kRingBytes + kPartialBytes;
  if constexpr (kNorm) fetch_gamma(run, norm);
  stream.start_weights();
  let_successor_start();
  wait_for_predecessor();
  if constexpr (kNorm)
    norm_rows(run, norm, partials, SplitEight<T>{});
  else
    stream.start_x();

  int turn = 0;
  for (int unit = static_cast<int>(blockIdx.x); unit < stream.units();
       unit += static_cast<int>(gridDim.x)) {
    float sums[kTiles][4] = {};
    for (int k = stream.first_k(); k < run.k; k += kLinearWarps * kRun) {
      XRun x;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        wait_copies<kStages - 1>();
        if (tile == 0) x = stream.read_x(k);
        uint4 weights[kSteps];
        stream.read_weights(weights);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          const uint4 &w = weights[step], &high = x.high[step], &low = x.low[step];
          multiply_add<T>(sums[tile], {high.x, low.x, high.y, low.y}, w.x, w.y);
          multiply_add<T>(sums[tile], {high.z, low.z, high.w, low.w}, w.z, w.w);
        }
        stream.fetch();
      }
    }

    // A lane has row lane / 4 of the tiles, the rounded part and the rest, at two outputs.
    float* const partial = partials + turn * kLinearWarps * kTiles * kPartial;
    const int lane = stream.lane();
    if (stream.has_x()) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
        *reinterpret_cast<float2*>(partial + (stream.warp() * kTiles + tile) * kPartial +
                                   lane / 4 * kTileRows + lane % 4 * 2) =
            float2{sums[tile][0] + sums[tile][2], sums[tile][1] + sums[tile][3]};
    }
    __syncthreads();
    finish_unit<T, kGated>(run, unit, partial);
    turn ^= 1;
  }
}

template <class T, bool kNorm, bool kGated>
cudaError_t launch_linear(LinearRun<T> run, cudaStream_t stream) {
  DeviceLimits limits;
  if (const cudaError_t error = device_limits(limits); error != cudaSuccess) return error;
  // As many rows at a time as the norm finds room for.
  int fit = run.rows;
  while (fit > 0 &&
         shared_bytes<T, kNorm>(fit, run.k) > static_cast<std::size_t>(limits.shared_bytes))
    --fit;
  if (fit == 0) return cudaErrorInvalidValue;
  const int passes = (run.rows + fit - 1) / fit, rows = run.rows;
  const int each = (rows + passes - 1) / passes;
  const auto kernel = linear_kernel<T, kNorm, kGated>;
  cudaError_t error = allow_shared_memory(kernel, limits);
  const int units = (run.n + outputs_of_unit(kGated) - 1) / outputs_of_unit(kGated);
  // More than half: a block for each multiprocessor, or an early start would put two on some and
  // none on others.
  const std::size_t alone = static_cast<std::size_t>(limits.shared_bytes) / 2 + 1;
  const Launch where{.grid = dim3(static_cast<unsigned>(std::min(units, limits.multiprocessors))),
                     .block = dim3(kLinearThreads),
                     .shared_bytes = std::max(shared_bytes<T, kNorm>(each, run.k), alone),
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
  return args.gamma ? launch_linear<T, true, false>(run_of<T>(args), stream)
                    : launch_linear<T, false, false>(run_of<T>(args), stream);
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
      return launch_linear<__nv_bfloat16, true, true>(run_of<__nv_bfloat16>(args), stream);
    case Type::f16:
      return launch_linear<__half, true, true>(run_of<__half>(args), stream);
    case Type::f32:
      return launch_linear_f32(run_of<float>(args), stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace kvlab::kernels
