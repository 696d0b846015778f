// How rows of logits foretell the tokens that followed, beside a yardstick's rows.
#pragma once

#include "kernels/types.hpp"

namespace kvlab::kernels {

struct ScoredRow {
  double nll;               ///< -ln of what the row gives the token that followed
  double kl;                ///< of the yardstick's distribution from the row's, in nats
  std::int32_t same_first;  ///< 1: the likeliest token (ties: the lowest id) is the yardstick's
  std::int32_t first;       ///< the likeliest token
};

/// All pointers are device memory.
struct RowScoreArgs {
  int rows, vocab;
  const float* logits;                 // [row, vocab]
  const float* yardstick;              // [its row, vocab]; may be `logits`
  const std::int32_t* yardstick_rows;  // [row]: which of the yardstick's
  const std::int32_t* next;  // [row]: the id that followed; below 0: zeros, nothing is read
  ScoredRow* scores;         // out, [row]
};
/// Exponentials in float32, sums in float64 and in a fixed order.
cudaError_t score_rows(const RowScoreArgs& args, cudaStream_t stream);

}  // namespace kvlab::kernels
