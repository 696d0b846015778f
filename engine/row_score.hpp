// How logits foretell: the score of a row beside another's, on the host.
#pragma once

#include <cstdint>
#include <span>

namespace kvlab {

/// One row of logits [vocab] scored against the token that followed and a yardstick's row, the full
/// cache's.
struct RowScore {
  double nll = 0;           ///< -ln of what the row gives the token that followed
  double kl = 0;            ///< of the yardstick's distribution from the row's, in nats
  bool same_first = false;  ///< the likeliest token is the yardstick's
  std::int32_t first = 0;   ///< the likeliest token; the lowest id of several
};
RowScore score_row(std::span<const float> yardstick, std::span<const float> logits,
                   std::int32_t next);

/// Rows of logits, and what each is scored against.
struct ScoredRows {
  const float* logits;                           ///< [row, vocab], in a backend's LogitMemory
  const float* yardstick;                        ///< [its row, vocab], likewise; may be `logits`
  std::span<const std::int32_t> yardstick_rows;  ///< [row]: which of the yardstick's
  std::span<const std::int32_t> next;            ///< [row]: what followed; -1: not scored, zeros
};

}  // namespace kvlab
