#include "engine/cuda/device_scores.hpp"

#include "kernels/host/transfer.hpp"
#include "kernels/row_score.hpp"

namespace kvlab {

std::vector<RowScore> device_scores(const ScoredRows& rows, std::uint32_t vocab) {
  constexpr const char* kWhat = "scoring logits";
  std::vector<RowScore> scores;
  if (rows.next.empty()) return scores;
  const cuda::DeviceBuffer baseline_row = cuda::upload(rows.baseline_rows, kWhat);
  const cuda::DeviceBuffer next = cuda::upload(rows.next, kWhat);
  const cuda::DeviceBuffer scored(rows.next.size() * sizeof(kernels::ScoredRow), kWhat);
  cuda::check(kernels::score_rows({.rows = static_cast<int>(rows.next.size()),
                                   .vocab = static_cast<int>(vocab),
                                   .logits = rows.logits,
                                   .baseline = rows.baseline,
                                   .baseline_rows = baseline_row.as<std::int32_t>(),
                                   .next = next.as<std::int32_t>(),
                                   .scores = scored.as<kernels::ScoredRow>()},
                                  nullptr),
              kWhat);
  for (const kernels::ScoredRow& row : cuda::download<kernels::ScoredRow>(scored))
    scores.push_back({row.nll, row.kl, row.same_first != 0, row.first});
  return scores;
}

}  // namespace kvlab
