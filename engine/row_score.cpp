#include "engine/row_score.hpp"

#include <algorithm>
#include <vector>

#include "traces/base/numeric/softmax.hpp"

namespace kvlab {

RowScore score_row(std::span<const float> yardstick, std::span<const float> logits,
                   std::int32_t next) {
  const auto first_of = [](std::span<const float> row) {
    return std::max_element(row.begin(), row.end()) - row.begin();
  };
  std::vector<float> e(logits.size());
  const std::int32_t shift = shared_exponentials(logits.data(), logits.size(), e.data());
  const double lse = log_sum_exp(shift, lane_sum(e.data(), e.size()));
  const std::int32_t yardstick_shift =
      shared_exponentials(yardstick.data(), yardstick.size(), e.data());
  const float yardstick_sum = lane_sum(e.data(), e.size());
  double difference = 0;
  for (std::size_t i = 0; i < e.size(); ++i)
    difference += static_cast<double>(e[i]) * static_cast<double>(yardstick[i] - logits[i]);
  return {.nll = lse - static_cast<double>(logits[static_cast<std::size_t>(next)]),
          .kl = difference / static_cast<double>(yardstick_sum) + lse -
                log_sum_exp(yardstick_shift, yardstick_sum),
          .same_first = first_of(yardstick) == first_of(logits),
          .first = static_cast<std::int32_t>(first_of(logits))};
}

}  // namespace kvlab
