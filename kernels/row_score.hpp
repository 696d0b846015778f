// Scores how well rows of logits predict the tokens that followed, compared with yardstick rows.
#pragma once

#include "kernels/types.hpp"

namespace kvlab::kernels {

struct ScoredRow {
  double nll;  ///< -ln of the probability that the row gives to the token that followed
  double kl;   ///< KL divergence of the row's distribution from the yardstick's, in nats
  /// 1: the likeliest token (ties: the lowest id) is also the yardstick's
  std::int32_t same_first;
  std::int32_t first;  ///< the likeliest token
};

/// All pointers are device memory.
struct RowScoreArgs {
  int rows, vocab;
  const float* logits;                 // [row, vocab]
  const float* yardstick;              // [its row, vocab]; may be `logits`
  const std::int32_t* yardstick_rows;  // [row]: index of the yardstick's row
  // [row]: the id that followed; below 0: the scores are 0 and nothing is read
  const std::int32_t* next;
  ScoredRow* scores;  // out, [row]
};
/// Exponentials are float32; sums are float64 and in a fixed order.
cudaError_t score_rows(const RowScoreArgs& args, cudaStream_t stream);

}  // namespace kvlab::kernels
