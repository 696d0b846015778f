// From a run to a policy file: the winner at a budget, with its evidence and those that tie with
// it.
#pragma once

#include <string>
#include <vector>

#include "engine/loop/policy_file.hpp"
#include "sim/run/ranking.hpp"
#include "sim/run/run.hpp"

namespace kvlab {

/// Who may be deployed at a budget.
struct Ballot {
  BudgetColumn budget;
  const MetricInfo* metric;
  Ranking ranking;
  std::size_t winner = 0;  ///< of the ranking's standings

  const std::vector<Standing>& standings() const { return ranking.standings; }
};

/// Ranks the policies of a run at `budget` (as asked in the run, or in tokens) by `metric`,
/// averaged over its traces. References and `full` do not stand. Throws
/// std::invalid_argument: an unknown metric, a budget that is not in the run (names those that are)
/// or that was not the same number of tokens for every trace, traces of several models.
Ballot rank_for_deployment(const Run& run, const Figures& figures, const std::string& budget,
                           const std::string& metric);

/// The cache that a standing of the run stands for; `compiled` are the policies of
/// --policy-source. Throws std::runtime_error if this build lacks the policy or it came from
/// another text.
CacheConfig config_of(const Run& run, const Ballot& ballot, const Figures& figures,
                      std::size_t standing, const CompiledPolicies& compiled = {});

/// The policy file of the ballot's winner, with the evidence.
PolicyFile policy_file_of(const Run& run, const Figures& figures, const Ballot& ballot,
                          const CompiledPolicies& compiled = {});

}  // namespace kvlab
