// Scores of rows of logits, a block each.
//
// Bytes: 4 * vocab a row and as many of its yardstick's, from memory once, then again from the L2
// cache. The floor is one reading of the rows and one of the yardstick's, which many rows share:
// 80 rows of 8,192 logits against 10 are 2.9 MB, about 0.7 us at 4.3 TB/s.
#include <cmath>

#include "kernels/device/likeliest.cuh"
#include "kernels/device/reduce.cuh"
#include "kernels/row_score.hpp"

namespace kvlab::kernels {
namespace {

using u64 = unsigned long long;

constexpr int kThreads = 256, kWarps = kThreads / kWarpSize;

__global__ void __launch_bounds__(kThreads) score_row(const RowScoreArgs args) {
  __shared__ u64 best_of_warp[2][kWarps];
  __shared__ double sum_of_warp[3][kWarps];
  const std::size_t row = blockIdx.x, vocab = static_cast<std::size_t>(args.vocab);
  const std::int32_t next = args.next[row];
  if (next < 0) {
    if (threadIdx.x == 0) args.scores[row] = {};
    return;
  }
  const float* const own = args.logits + row * vocab;
  const float* const other =
      args.yardstick + static_cast<std::size_t>(args.yardstick_rows[row]) * vocab;
  u64 best = 0, other_best = 0;
  for (int id = static_cast<int>(threadIdx.x); id < args.vocab; id += kThreads) {
    best = max(best, candidate(own[id], id));
    other_best = max(other_best, candidate(other[id], id));
  }
  best = block_max(best, best_of_warp[0]);
  other_best = block_max(other_best, best_of_warp[1]);
  const float largest = logit_of(best), other_largest = logit_of(other_best);

  double sum = 0, other_sum = 0, difference = 0;
  for (int id = static_cast<int>(threadIdx.x); id < args.vocab; id += kThreads) {
    const float logit = own[id], wanted = other[id];
    const double e = static_cast<double>(expf(wanted - other_largest));
    sum += static_cast<double>(expf(logit - largest));
    other_sum += e;
    difference += e * (static_cast<double>(wanted) - static_cast<double>(logit));
  }
  sum = block_sum(sum, sum_of_warp[0]);
  other_sum = block_sum(other_sum, sum_of_warp[1]);
  difference = block_sum(difference, sum_of_warp[2]);
  if (threadIdx.x != 0) return;
  const double lse = log(sum) + static_cast<double>(largest);
  const double other_lse = log(other_sum) + static_cast<double>(other_largest);
  args.scores[row] = {.nll = lse - static_cast<double>(own[next]),
                      .kl = difference / other_sum + lse - other_lse,
                      .same_first = id_of(best) == id_of(other_best),
                      .first = id_of(best)};
}

}  // namespace

cudaError_t score_rows(const RowScoreArgs& args, cudaStream_t stream) {
  if (args.rows < 1 || args.vocab < 1 || !args.logits || !args.yardstick || !args.yardstick_rows ||
      !args.next || !args.scores)
    return cudaErrorInvalidValue;
  score_row<<<static_cast<unsigned>(args.rows), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace kvlab::kernels
