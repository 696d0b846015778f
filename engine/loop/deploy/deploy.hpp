// From a run to a policy file: the winner at a budget, with its evidence and those that tie with
// it.
#pragma once

#include <string>
#include <vector>

#include "engine/loop/deploy/candidates.hpp"
#include "engine/loop/policy_file.hpp"
#include "sim/run/ranking.hpp"
#include "sim/run/run.hpp"

namespace kvlab {

/// Who may be deployed at a budget, the best first.
struct Ballot {
  BudgetColumn budget;
  const MetricInfo* metric;
  std::vector<Standing> standings;
  std::vector<double> kv_bytes;  ///< [standing]: kept at the end of the replay, mean over traces
  std::size_t winner = 0;        ///< index into standings

  double least_kv_bytes() const;
};

/// One of the ballot as a contender that ties with the first, or does not.
Candidate candidate_of(const Figures& figures, const Ballot& ballot, std::size_t standing,
                       bool ties);

/// Ranks the policies of a run at `budget` (as asked in the run, or in tokens) by `metric`,
/// averaged over its traces. References and `full` do not stand. Of those that tie with the first
/// the one that keeps least wins, and `random` only where no other ties. Throws
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
