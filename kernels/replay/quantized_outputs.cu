// Computes the outputs of sampled queries in quantized caches. From each copy (see replay.hpp), a
// cache reads only the kept tokens that belong to it. These are few, so the kernel first lists
// them.
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

#include "kernels/device/fold.cuh"
#include "kernels/device/load.cuh"
#include "kernels/device/store.cuh"
#include "kernels/replay/replay.hpp"

namespace kvlab::kernels {
namespace {

constexpr int kThreads = 128;
constexpr int kListed = 32 * kThreads;  // tokens per list

/// Lists the kept tokens of a copy from `first` on, in order. Called by the whole thread block.
/// Returns their number.
__device__ int list_tokens(const std::uint32_t* words, int first, int query,
                           std::uint32_t (&tokens)[kListed]) {
  using Scan = cub::BlockScan<int, kThreads>;
  __shared__ Scan::TempStorage shared;
  const int begin = first + 32 * static_cast<int>(threadIdx.x), left = query + 1 - begin;
  std::uint32_t bits = left > 0 ? words[begin / 32] : 0;
  if (left > 0 && left < 32) bits &= (1u << left) - 1;
  int before = 0, count = 0;
  Scan(shared).ExclusiveSum(__popc(bits), before, count);
  for (; bits != 0; bits &= bits - 1)
    tokens[before++] = static_cast<std::uint32_t>(begin + __ffs(static_cast<int>(bits)) - 1);
  __syncthreads();
  return count;
}

/// Four dimensions of a copy's value: the sum of its two largest parts (float32: of its only part).
/// `at` is a multiple of 4.
__device__ inline float4 value_of(const ReplayOutputsArgs& args, int copy, std::int64_t at) {
  const Type type = args.shape.type;
  if (copy == 0) return load4(args.values, type, at);
  at += args.copies.first_part(copy, type);
  float4 sum = load4(args.copies.values, type, at);
  if (type != KVLAB_F32) add(sum, load4(args.copies.values, type, at + args.copies.vectors));
  return sum;
}

/// A cache's outputs for one query. head_size / 4 threads form a group; each of them computes four
/// dimensions of all heads. Each group handles a part of the tokens.
struct QuantizedOutputs {
  const ReplayOutputsArgs& args;
  const int task, query;
  const std::int64_t row, kept;  ///< index among all rows, and index among all kept sets
  const int lanes = args.shape.head_size / 4, lane = static_cast<int>(threadIdx.x) % lanes,
            group = static_cast<int>(threadIdx.x) / lanes;
  float4 sums[kMaxReplayGroup] = {};

  __device__ const std::uint32_t* words(int copy) const {
    const int words = args.shape.words();
    return copy == 0 ? args.sets.shared + kept * words
                     : args.sets.quantized + (kept * args.copies.count + copy - 1) * words;
  }
  __device__ void add(int copy, const std::uint32_t* tokens, int count) {
    const ReplayShape& shape = args.shape;
    const float4* const e =
        args.rows.e + copy * args.copies.rows + row * shape.head_groups() * shape.tokens;
#pragma unroll 4
    for (int n = group; n < count; n += kThreads / lanes) {
      const std::int64_t token = tokens[n];
      const float4 value = value_of(args, copy, shape.vector(task, token) + 4 * lane);
#pragma unroll
      for (int head = 0; head < kMaxReplayGroup; ++head) {
        if (head >= shape.group) break;
        add_product(sums[head], component(e[head / 4 * shape.tokens + token], head % 4), value);
      }
    }
  }
  /// Adds the sums of all groups, in order, and writes the totals to the first group's part of
  /// `parts`.
  __device__ void merge(float4 (&parts)[kThreads][kMaxReplayGroup]) const {
#pragma unroll
    for (int head = 0; head < kMaxReplayGroup; ++head) parts[threadIdx.x][head] = sums[head];
    __syncthreads();
    for (int g = 1; group == 0 && g < kThreads / lanes; ++g)
      for (int head = 0; head < args.shape.group; ++head)
        kernels::add(parts[lane][head], parts[g * lanes + lane][head]);
  }
};

/// Uses one thread block for each query (x), quantized configuration (y) and head task (z). With
/// separate head tasks (config_tasks), y is 0 and the head task determines the configuration.
__global__ void __launch_bounds__(kThreads)
    quantized_outputs_kernel(const __grid_constant__ ReplayOutputsArgs args) {
  using Sum = cub::BlockReduce<double, kThreads>;
  __shared__ Sum::TempStorage shared;
  __shared__ std::uint32_t tokens[kListed];
  __shared__ float4 parts[kThreads][kMaxReplayGroup];
  const int i = static_cast<int>(blockIdx.x), task = static_cast<int>(blockIdx.z),
            index = args.measured.index[args.rows.first + i], tasks = args.sweep.config_tasks,
            config = tasks ? task / tasks : args.configs.indices[blockIdx.y];
  if (!args.measured.samples(index) || config < 0 || !args.sweep.is_quantized(task, config)) return;
  const std::int64_t cache = args.sweep.cache_of(task, config),
                     sample = args.sets.sample_of(args.measured, cache, index);
  const ReplayShape& shape = args.shape;
  QuantizedOutputs outputs{args, task, args.rows.first + i, args.rows.row(task, i),
                           args.sets.kept_of(cache, index)};
  for (int copy = 0; copy <= args.copies.count; ++copy) {
    if (!(args.sweep.rules[cache].copies >> copy & 1)) continue;
    for (int first = 0; first <= outputs.query; first += kListed) {
      outputs.add(copy, tokens, list_tokens(outputs.words(copy), first, outputs.query, tokens));
      __syncthreads();
    }
  }
  outputs.merge(parts);
  for (int head = 0; head < shape.group; ++head) {
    const std::int64_t d = std::int64_t{head} * shape.head_size + 4 * outputs.lane,
                       width = std::int64_t{shape.group} * shape.head_size;
    float4& direct = *reinterpret_cast<float4*>(args.sets.values + sample * width + d);
    const ReplayKept& kept = args.sets.kept[outputs.kept];
    float4 out = parts[threadIdx.x][head];
    if (outputs.group == 0 && kept.direct) add(out, direct);
    const float over = 1 / kept.sums[head];
    out = {out.x * over, out.y * over, out.z * over, out.w * over};
    if (args.outputs) {
      const std::int64_t to =
          (std::int64_t{config} * shape.tokens + outputs.query) * tasks + task % tasks;
      if (outputs.group != 0) continue;
      store2(args.outputs, shape.type, to * width + d, {out.x, out.y});
      store2(args.outputs, shape.type, to * width + d + 2, {out.z, out.w});
      continue;
    }
    double error = 0, size = 0;
    if (outputs.group == 0) {
      const float4 full = *reinterpret_cast<const float4*>(args.full + outputs.row * width + d);
      const auto take = [&](float wanted, float got) {
        const double left = double{wanted} - got;
        error += left * left, size += double{wanted} * wanted;
        return static_cast<float>(left);
      };
      const float4 off{take(full.x, out.x), take(full.y, out.y), take(full.z, out.z),
                       take(full.w, out.w)};
      if (args.stores_errors) direct = off;
    }
    const double off = Sum(shared).Sum(error);
    __syncthreads();
    const double all = Sum(shared).Sum(size);
    __syncthreads();
    if (threadIdx.x == 0) args.errors[sample * kMaxReplayGroup + head] = {off, all};
  }
}

}  // namespace

cudaError_t replay_quantized_outputs(const ReplayOutputsArgs& args, cudaStream_t stream) {
  const int configs = args.sweep.config_tasks ? 1 : args.configs.tiles * kReplayTile;
  quantized_outputs_kernel<<<grid_of(args.rows.count, configs, args.shape.tasks), kThreads, 0,
                             stream>>>(args);
  return cudaGetLastError();
}

}  // namespace kvlab::kernels
