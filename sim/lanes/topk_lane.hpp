// `oracle_topk` at several budgets: each query and query head keeps its B most probable tokens, so
// that one sorted row gives every budget. Queries of a dense prefill keep all.
#pragma once

#include "sim/lanes/lane.hpp"

namespace kvlab {

class TopkLane final : public Lane {
 public:
  TopkLane(std::vector<LaneConfig> configs, std::uint32_t group, const QuerySpan& span);

  bool wants_row(std::uint32_t query) const override { return span_.contains(query); }
  void attend(std::uint32_t first, std::uint32_t count, GroupRows& rows) override;
  std::vector<LaneOutcome> outcomes() override;
  void watch(LaneWatcher) override {}  ///< it keeps a set for each query head, not for a KV head

 private:
  void attend_head(std::uint32_t query, std::uint32_t head, GroupRows& rows);

  std::vector<LaneConfig> configs_;
  std::vector<HeadStats> stats_;
  const QuerySpan& span_;
  std::vector<std::uint32_t> sorted_, room_;  // a row's bits, the smallest first
};

}  // namespace kvlab
