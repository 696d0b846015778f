// Scores how well rows of logits predict the tokens that followed, and compares them with baseline
// rows.
#pragma once

#include "kernels/types.hpp"

namespace kvlab::kernels {

struct ScoredRow {
  double nll;  ///< -ln of the row's probability of the token that followed
  double kl;   ///< KL divergence of the row's distribution from the baseline's, in nats
  /// 1 if the most probable token (among equals, the one with the lowest id) is also the baseline's
  std::int32_t same_first;
  std::int32_t first;  ///< the most probable token
};

/// All pointers are device memory.
struct RowScoreArgs {
  int rows, vocab;
  const float* logits;                // [row, vocab]
  const float* baseline;              // [baseline row, vocab]; may be `logits`
  const std::int32_t* baseline_rows;  // [row]: index of the row's baseline row
  // [row]: the id that followed; if it is below 0, the scores are 0 and nothing is read
  const std::int32_t* next;
  ScoredRow* scores;  // [row], output
};
/// Exponentials are float32; sums are float64 and in a fixed order.
cudaError_t score_rows(const RowScoreArgs& args, cudaStream_t stream);

}  // namespace kvlab::kernels
