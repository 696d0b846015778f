// Computes metrics from the counts of the caches over a block of queries and from the errors of
// their outputs. Metrics are added in the order of the queries, so that every replay gives the same
// result.
#include "kernels/replay/metrics.cuh"

namespace kvlab::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;

/// Returns what one head of query i of the block sees in a cache.
__device__ inline QueryResult result_of(const ReplayMetricsArgs& args, std::int64_t task,
                                        std::int64_t cache, int i, int head) {
  const ReplayRows& rows = args.rows;
  const int heads = 4 * args.shape.head_groups();
  const std::int64_t row = rows.row(task, i) * heads + head, query = cache * rows.block + i,
                     count = query * heads + head;
  const auto position = static_cast<std::uint32_t>(rows.first + i);
  const std::uint32_t wanted = reinterpret_cast<const std::uint32_t*>(rows.wanted)[row],
                      live = args.counts.live[query];
  const bool whole = live > position;
  const float recall =
      whole ? 1.0f : args.counts.kept[count] / reinterpret_cast<const float*>(rows.sums)[row];
  return {.recall = double{recall},
          .position = position,
          .live = live,
          .wanted = wanted,
          .missed = whole ? 0 : wanted - args.counts.hits[count]};
}

/// Computes recalls and sums of metrics. Uses one thread block for each configuration (x) and head
/// task (y). fp16 copies come after the other configurations and have no thread block. In the first
/// loop, a thread computes the terms of one query and head. In the second loop, it adds up one sum
/// of one head over the queries.
__global__ void __launch_bounds__(kThreads)
    counts_kernel(const __grid_constant__ ReplayMetricsArgs args) {
  __shared__ float terms[kMaxReplayQueries][kMaxReplayGroup][kQuerySums];
  static_assert(sizeof(terms) <= 48 * 1024, "2 KiB per query sum, and a kernel has 48 KiB");
  const ReplayRows& rows = args.rows;
  const int group = args.shape.group, thread = static_cast<int>(threadIdx.x);
  const std::int64_t task = blockIdx.y,
                     cache = args.sweep.cache_of(task, static_cast<int>(blockIdx.x));
  for (int n = thread; n < rows.count * group; n += kThreads) {
    const int i = n / group, head = n % group, index = args.measured.index[rows.first + i];
    if (index < 0) continue;
    const QueryResult result = result_of(args, task, cache, i, head);
    const SumTerms own = terms_of(result);
#pragma unroll
    for (std::size_t s = 0; s < kQuerySums; ++s)
      terms[i][head][s] = static_cast<float>(is_log_sum(s) ? -log(own.of[s]) : own.of[s]);
    args.recalls[(cache * group + head) * args.measured.size + index] =
        static_cast<float>(result.recall);
  }
  __syncthreads();
  for (int n = thread; n < static_cast<int>(kQuerySums) * group; n += kThreads)
    for (int i = 0; i < rows.count; ++i) {
      const int which = n / group, head = n % group, index = args.measured.index[rows.first + i];
      if (index >= 0)
        metric_sum(args, cache, static_cast<Sum>(which), head,
                   block_of_query(args.measured, index)) += terms[i][head][which];
    }
}

/// Adds up the errors of outputs, and copies their residuals. Uses one warp for each cache; lane l
/// handles head l and direction l of the residual stream.
__global__ void __launch_bounds__(kThreads)
    errors_kernel(const __grid_constant__ ReplayMetricsArgs args) {
  const int cache = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / kWarpSize),
            head = static_cast<int>(threadIdx.x) % kWarpSize, group = args.shape.group;
  if (cache >= args.shape.tasks * args.sweep.configs) return;
  for (int i = 0; i < args.rows.count; ++i) {
    const int index = args.measured.index[args.rows.first + i], every = args.measured.sample_every;
    if (!args.measured.samples(index)) continue;
    const std::int64_t sample = args.sets.sample_of(args.measured, cache, index),
                       to = std::int64_t{cache} * args.samples + index / every;
    if (args.residual)
      args.residual[to * kReplayResiduals + head] =
          args.block_residual[sample * kReplayResiduals + head];
    double2 squares{};
    if (head < group) {
      squares = args.block_errors[sample * kMaxReplayGroup + head];
      const int block = block_of_query(args.measured, index);
      if (squares.y > 0)
        metric_sum(args, cache, Sum::error, head, block) += sqrt(squares.x / squares.y);
      metric_sum(args, cache, squares.y > 0 ? Sum::errors : Sum::zeros, head, block) += 1;
    }
    double error = 0, size = 0;
    for (int h = 0; h < group; ++h) {
      error += __shfl_sync(~0u, squares.x, h);
      size += __shfl_sync(~0u, squares.y, h);
    }
    if (head == 0) args.errors[2 * to] = error, args.errors[2 * to + 1] = size;
  }
}

}  // namespace

cudaError_t replay_metrics(const ReplayMetricsArgs& args, cudaStream_t stream) {
  static_assert(kReplayResiduals == kWarpSize);
  const int caches = args.shape.tasks * args.sweep.configs;
  if (caches < 1 || args.rows.count > kMaxReplayQueries) return cudaErrorInvalidValue;
  counts_kernel<<<grid_of(args.sweep.configs - args.fp16_copies, args.shape.tasks), kThreads, 0,
                  stream>>>(args);
  errors_kernel<<<(caches + kWarps - 1) / kWarps, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace kvlab::kernels
