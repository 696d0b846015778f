// From a run to a policy file: the winner at a budget, with its evidence and those that tie with
// it.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "engine/loop/eval/score.hpp"
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

// The first of a ballot in the closed loop: the order that decides, and what cannot be told apart.

/// What the closed loop said of one standing.
struct Confirmed {
  std::size_t standing;  ///< of the ballot
  EvalScore score;
  Difference behind;  ///< its KL less the first's, paired over the same tokens
  bool holds_more;    ///< than the budget

  bool ties() const { return !holds_more && !behind.behind(); }
};

/// What an evaluation of the full cache and the ballot's first standings, in their order, says: the
/// least KL first, and behind them who holds more than the budget. Its winner becomes the ballot's.
std::vector<Confirmed> confirm(const Evaluation& evaluation, Ballot& ballot);

/// One object an entry, with `behind` and `ties_with_first`.
nlohmann::ordered_json confirmed_json(const std::vector<Confirmed>& confirmed,
                                      const Figures& figures, const Ballot& ballot);

}  // namespace kvlab
