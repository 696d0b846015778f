// `oracle_topk` at several budgets. For each query, each query head keeps its B most probable
// tokens, where B is the budget. So one row, roughly sorted, gives the results for all budgets.
// Queries of a dense prompt keep all tokens.
#pragma once

#include <cstdint>
#include <vector>

#include "sim/config_batches/config_batch.hpp"
#include "sim/config_batches/group_rows.hpp"
#include "sim/row_measure.hpp"

namespace kvlab {

// Computes the sums of the B largest exponentials of a row, for many budgets B at once. The
// exponentials are not sorted but put into bins by size. The order within a bin matters only if the
// B-th largest exponential, for one of the budgets, lies inside the bin.

class TopSums {
 public:
  /// `budgets` must be ascending and distinct.
  explicit TopSums(std::vector<std::uint32_t> budgets);

  const std::vector<std::uint32_t>& budgets() const { return budgets_; }

  /// Puts the row of `query` into bins, for every head of the group.
  void begin_row(std::uint32_t query, const GroupRows& rows);
  /// Computes one head's sums, for every budget that is at most the number of tokens in the row.
  void take(std::uint32_t head);
  struct Level {
    double sum;             ///< sum of the B largest exponentials
    float min_exponential;  ///< the smallest of these exponentials
  };
  /// The results of the last take(), by budget.
  const Level& level(std::size_t i) const { return levels_[i]; }

 private:
  std::uint32_t range_of(const float* e, std::uint32_t max_word) const;
  void scatter(std::uint32_t head);
  std::uint32_t sort_bin_of(std::uint32_t head, std::uint32_t index);

  std::vector<std::uint32_t> budgets_;
  std::vector<Level> levels_;  // [budget]
  // [head]: the bits of the largest exponential, and the shift that turns a difference of bits into
  // a bin
  std::vector<std::uint32_t> largest_, shift_;
  std::uint32_t tokens_ = 0, bins_ = 0;  // bins_: number of bins without the kRestBins
  std::size_t stride_ = 0;
  std::vector<std::uint32_t> bits_;   // [head][token]
  std::vector<std::uint16_t> bin_;    // [head][token]: bin; 0 has the largest values
  std::vector<std::uint32_t> ends_;   // [bin]: where the bin ends in order_
  std::vector<std::uint32_t> order_;  // bits, sorted by bin
};

class TopkConfigBatch final : public ConfigBatch {
 public:
  TopkConfigBatch(BatchedConfigs configs, std::uint32_t group, const MeasuredQueries& measured);

  bool wants_row(std::uint32_t query) const override { return measure_.measures(query); }
  void attend(std::uint32_t first, std::uint32_t count, GroupRows& rows) override;
  std::vector<HeadOutcome> outcomes() override;
  /// No-op, because oracle_topk keeps a set for each query head, not for a KV head.
  void watch(ConfigBatchWatcher) override {}

 private:
  void attend_query(std::uint32_t query, GroupRows& rows);
  void measure(std::uint32_t query, std::uint32_t head, GroupRows& rows);
  bool keeps_all(std::size_t config, std::uint32_t query) const {
    return configs_[config]->budget_tokens > query || configs_[config]->in_dense_prompt[query];
  }

  BatchedConfigs configs_;
  std::vector<std::size_t> level_;  // [config]: index of its budget in sums_.budgets()
  RowMeasure measure_;
  TopSums sums_;
};

}  // namespace kvlab
