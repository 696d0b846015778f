// `oracle_topk` at several budgets: each query and query head keeps its B most probable tokens, so
// that one row in rough order gives every budget. Queries of a dense prefill keep all.
#pragma once

#include "sim/lanes/lane.hpp"
#include "sim/lanes/nested/top_sums.hpp"
#include "sim/row_measure.hpp"

namespace kvlab {

class TopkLane final : public Lane {
 public:
  TopkLane(LaneConfigs configs, std::uint32_t group, const QuerySpan& span);

  bool wants_row(std::uint32_t query) const override { return measure_.measures(query); }
  void attend(std::uint32_t first, std::uint32_t count, GroupRows& rows) override;
  std::vector<HeadOutcome> outcomes() override;
  void watch(LaneWatcher) override {}  ///< it keeps a set for each query head, not for a KV head

 private:
  void attend_query(std::uint32_t query, GroupRows& rows);
  void measure(std::uint32_t query, std::uint32_t head, GroupRows& rows);
  bool keeps_all(std::size_t config, std::uint32_t query) const {
    return configs_[config]->budget_tokens > query || configs_[config]->in_dense_prompt[query];
  }

  LaneConfigs configs_;
  std::vector<std::size_t> level_;  // [config]: its budget's place in sums_
  RowMeasure measure_;
  TopSums sums_;
};

}  // namespace kvlab
