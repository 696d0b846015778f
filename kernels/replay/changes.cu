// Computes, for every measured query and cache, how much the log-likelihood of the gradient samples
// changes if the query attends only to the kept set. A weighted term is the exponential of a token
// times its term. The change is the sum of the weighted terms of the kept tokens divided by the sum
// of their exponentials, minus the same quotient over all tokens. Tensor cores compute the sums of
// weighted terms as a product of bits (1: the cache keeps the token) and weighted terms.
//
// One product has 16 configurations and 16 columns (a column is a gradient sample and a query head
// of the group). The weighted terms of a column are the same for all configurations. They are split
// into two bf16 parts (16 bits of precision).
#include "kernels/device/half_parts.cuh"
#include "kernels/replay/direct.cuh"

namespace kvlab::kernels {
namespace {

constexpr int kWarps = 8;     // per thread block; each processes every eighth step
constexpr int kTile = 16;     // configurations
constexpr int kColumns = 16;  // maximum number; a tile contains whole gradient samples
constexpr int kTokens = 16;   // per step
constexpr int kThreads = kWarps * kWarpSize;
static_assert(kThreads == kTile * kColumns && kColumns >= kMaxReplayGroup);

__host__ __device__ constexpr int gradient_samples_at_once(int group) { return kColumns / group; }

/// Partial sums of one warp.
struct Sums {
  float config_sums[kTile][kColumns], full[kColumns];
};

/// A tile of columns and configurations, for one query of one head task. kQuantized: the
/// configurations are quantized.
template <bool kQuantized>
class Changes {
 public:
  __device__ Changes(const ReplayChangesArgs& args, int index)
      : args_(args),
        i_(static_cast<int>(blockIdx.x)),
        task_(static_cast<int>(blockIdx.z)),
        index_(index),
        lane_(static_cast<int>(threadIdx.x) % kWarpSize),
        warp_(static_cast<int>(threadIdx.x) / kWarpSize),
        terms_(args.shape, args.terms, task_, index) {
    const int group = args.shape.group, chunk_samples = gradient_samples_at_once(group),
              chunks = (args.terms.gradient_samples + chunk_samples - 1) / chunk_samples;
    tile_ = static_cast<int>(blockIdx.y) / chunks;
    first_gradient_sample_ = static_cast<int>(blockIdx.y) % chunks * chunk_samples;
    gradient_samples_ = min(chunk_samples, args.terms.gradient_samples - first_gradient_sample_);
    for (int n = 0; n < 2; ++n) {
      const int config = config_of(lane_ / 4 + 8 * n);
      if (config < 0) continue;
      const ReplayRule& rule = args.sweep.rules[args.sweep.cache_of(task_, config)];
      kept_[n] = args.sets.kept_of(args.sweep.cache_of(task_, config), index);
      words_[n] = args.sets.shared + kept_[n] * args.shape.words();
      kind_[n] = rule.cache_positions && args.cache_positions ? 1 : 0;
      if (kQuantized) copies_[n] = rule.copies;
    }
    const std::int64_t row =
        args.rows.row(task_, i_) * args.shape.head_groups() * args.shape.tokens;
    rows_[0] = reinterpret_cast<const float*>(args.rows.e + row);
    rows_[1] =
        args.cache_positions ? reinterpret_cast<const float*>(args.cache_positions + row) : nullptr;
  }

  /// Computes the sums over the tokens of this warp, and writes them to `to`. Called by a warp.
  __device__ void sum(Sums& to) {
    const int query = args_.rows.first + i_;
    if constexpr (kQuantized)
      for (copy_ = 0; copy_ <= args_.copies.count; ++copy_) {
        const bool multiplies = take(copy_);
        for (int first = warp_ * kTokens; first <= query && (multiplies || copy_ == 0);
             first += kWarps * kTokens)
          step(first, query, 0, multiplies);
      }
    bool has_kind[2];
    for (int kind = 0; kind < 2; ++kind)
      has_kind[kind] = __any_sync(~0u, kind_[0] == kind || kind_[1] == kind);
    for (int first = warp_ * kTokens; !kQuantized && first <= query; first += kWarps * kTokens) {
      step(first, query, 0, has_kind[0]);
      if (has_kind[1]) step(first, query, 1, true);
    }
    const int row = lane_ / 4, column = 2 * (lane_ % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int c = 0; c < 4; ++c)
        to.config_sums[row + c / 2 * 8][8 * half + column + c % 2] = sums_[half][c];
      for (int distance = 1; distance < 4; distance *= 2)
        full_[half] += __shfl_xor_sync(~0u, full_[half], distance);
      if (lane_ % 4 == 0) to.full[8 * half + row] = full_[half];
    }
  }

  /// Computes the changes from the sums of all warps. Called by the whole thread block; each thread
  /// handles one configuration and column.
  __device__ void put(Sums (&sums)[kWarps]) const {
    const int row = static_cast<int>(threadIdx.x) / kColumns,
              column = static_cast<int>(threadIdx.x) % kColumns, config = config_of(row);
    float change = 0;
    if (config >= 0 && column < gradient_samples_ * args_.shape.group)
      change = change_of(sums, row, column, config);
    __syncthreads();
    sums[0].config_sums[row][column] = change;
    __syncthreads();
    if (config < 0 || column >= gradient_samples_) return;
    float all = 0;
    for (int head = 0; head < args_.shape.group; ++head)
      all += sums[0].config_sums[row][column * args_.shape.group + head];
    const std::int64_t query = args_.sweep.cache_of(task_, config) * args_.measured.size + index_;
    args_.changes[query * args_.terms.gradient_samples + first_gradient_sample_ + column] = all;
  }

 private:
  /// Switches to a copy: its tokens, its row and its terms. Called by a warp. Returns whether any
  /// configuration has tokens of this copy.
  __device__ bool take(int copy) {
    const int words = args_.shape.words();
    for (int n = 0; n < 2; ++n) {
      words_[n] = nullptr;
      if (!(copies_[n] >> copy & 1)) continue;
      words_[n] = copy == 0
                      ? args_.sets.shared + kept_[n] * words
                      : args_.sets.quantized + (kept_[n] * args_.copies.count + copy - 1) * words;
    }
    if (copy > 0) rows_[0] += 4 * args_.copies.rows;
    if (copy > 0) terms_ = terms_.of_copy(args_.copies, 1);
    return __any_sync(~0u, words_[0] || words_[1]);
  }
  __device__ int config_of(int row) const {
    const int at = tile_ * kTile + row;
    return at < args_.configs.tiles * kReplayTile ? args_.configs.indices[at] : -1;
  }

  /// Adds 16 tokens to the sums of the configurations that read rows of kind `kind` (0: original
  /// positions, 1: cache positions). Kind 0 of copy 0 also adds them to the sum over all tokens.
  __device__ void step(int first, int query, int kind, bool multiplies) {
    const int t = lane_ % 4;
    std::uint32_t a[4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const std::uint32_t bits =
          words_[n] && kind_[n] == kind ? words_[n][first / 32] >> (first % 32 + 2 * t) : 0;
      a[n] = ones_of(bits), a[n + 2] = ones_of(bits >> 8);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = 8 * half + lane_ / 4;
      const Bf16Parts low = couple(first + 2 * t, query, column, kind),
                      high = couple(first + 2 * t + 8, query, column, kind);
      if (kind == 0 && copy_ == 0) full_[half] += sum_of(low) + sum_of(high);
      if (!multiplies) continue;
      multiply_add<__nv_bfloat16>(sums_[half], a, low.left, high.left);
      multiply_add<__nv_bfloat16>(sums_[half], a, low.kept, high.kept);
    }
  }
  /// Converts two bits to two bf16 numbers, 1 or 0.
  __device__ static std::uint32_t ones_of(std::uint32_t bits) {
    return (bits & 1) * 0x3f80u + (bits >> 1 & 1) * 0x3f800000u;
  }

  __device__ static float sum_of(const Bf16Parts& two) {
    const float2 a = unpack<__nv_bfloat16>(two.kept), b = unpack<__nv_bfloat16>(two.left);
    return (a.x + a.y) + (b.x + b.y);
  }
  /// The weighted terms of two tokens. They are zero for tokens after the query and for columns
  /// beyond the last one.
  __device__ Bf16Parts couple(int token, int query, int column, int kind) const {
    const int group = args_.shape.group, head = column % group;
    float z[2] = {};
    if (column < gradient_samples_ * group)
#pragma unroll
      for (int n = 0; n < 2; ++n)
        if (token + n <= query)
          z[n] = rows_[kind]
                      [(std::int64_t{head / 4} * args_.shape.tokens + token + n) * 4 + head % 4] *
                 terms_.at(static_cast<std::uint32_t>(token + n),
                           first_gradient_sample_ * group + column);
    return Bf16Parts::split(z[0], z[1]);
  }

  __device__ float change_of(const Sums (&sums)[kWarps], int row, int column, int config) const {
    const std::int64_t kept = args_.sets.kept_of(args_.sweep.cache_of(task_, config), index_);
    const ReplayKept& set = args_.sets.kept[kept];
    if (set.whole) return 0;
    float own = 0, full = 0;
    for (int warp = 0; warp < kWarps; ++warp)
      own += sums[warp].config_sums[row][column], full += sums[warp].full[column];
    const int group = args_.shape.group, head = column % group;
    if (set.direct)
      own += args_.sets.changes[kept * terms_.columns + first_gradient_sample_ * group + column];
    const std::int64_t head_groups = args_.rows.row(task_, i_) * args_.shape.head_groups();
    const float sum = reinterpret_cast<const float*>(args_.rows.sums + head_groups)[head];
    return (own / set.sums[head] - full / sum) *
           args_.term_scales[std::int64_t{task_} * args_.measured.size + index_];
  }

  const ReplayChangesArgs& args_;
  const int i_, task_, index_, lane_, warp_;
  QueryTerms terms_;
  int tile_, first_gradient_sample_, gradient_samples_;
  int kind_[2] = {-1, -1};
  int copy_ = 0;
  std::uint32_t copies_[2] = {};
  std::int64_t kept_[2] = {};
  const std::uint32_t* words_[2] = {};
  const float* rows_[2];
  float sums_[2][4] = {}, full_[2] = {};
};

/// Uses one thread block for each query (x), tile and chunk of gradient samples (y), and head task
/// (z).
template <bool kQuantized>
__global__ void __launch_bounds__(kThreads)
    changes_kernel(const __grid_constant__ ReplayChangesArgs args) {
  __shared__ Sums sums[kWarps];
  const int index = args.measured.index[args.rows.first + static_cast<int>(blockIdx.x)];
  if (index < 0) return;
  Changes<kQuantized> changes(args, index);
  changes.sum(sums[threadIdx.x / kWarpSize]);
  __syncthreads();
  changes.put(sums);
}

template <bool kQuantized>
cudaError_t change(const ReplayChangesArgs& args, cudaStream_t stream) {
  const int tiles = (args.configs.tiles * kReplayTile + kTile - 1) / kTile,
            chunk_samples = gradient_samples_at_once(args.shape.group),
            chunks = (args.terms.gradient_samples + chunk_samples - 1) / chunk_samples;
  changes_kernel<kQuantized>
      <<<grid_of(args.rows.count, tiles * chunks, args.shape.tasks), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

cudaError_t replay_changes(const ReplayChangesArgs& args, cudaStream_t stream) {
  const ReplaySets& configs = args.configs;
  if (!args.rows.is_launchable() || configs.tiles + configs.quantized_tiles < 1 ||
      !args.shape.is_launchable() || args.terms.gradient_samples < 1 ||
      args.terms.gradient_samples > kMaxReplayGradientSamples || args.sets.every != 1)
    return cudaErrorInvalidValue;
  cudaError_t error = configs.tiles > 0 ? change<false>(args, stream) : cudaSuccess;
  if (error != cudaSuccess || configs.quantized_tiles == 0) return error;
  ReplayChangesArgs quantized = args;
  quantized.configs = configs.quantized_only();
  return change<true>(quantized, stream);
}

}  // namespace kvlab::kernels
