// From a run to a policy file: the winner at a budget, with its evidence and those that tie with
// it.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "engine/evaluation/eval.hpp"
#include "engine/evaluation/eval/score.hpp"
#include "engine/evaluation/policy_file.hpp"
#include "engine/evaluation/task/run.hpp"
#include "sim/run/ranking.hpp"
#include "sim/run/run.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
/// What may be deployed at a budget.
struct Ballot {
  BudgetColumn budget;
  const MetricInfo* metric;
  Ranking ranking;
  std::size_t winner = 0;  ///< of the ranking's standings

  const std::vector<Standing>& standings() const { return ranking.standings; }
};

/// Ranks the policies of a run at `budget` (as requested in the run, or in tokens) by `metric`,
/// averaged over its traces. References and `full` do not stand. Throws
/// std::invalid_argument: an unknown metric, a budget that is not in the run (names those that are)
/// or that was not the same number of tokens for every trace, traces of several models.
Ballot rank_for_deployment(const Run& run, const MetricTable& metric_table,
                           const std::string& budget, const std::string& metric);

/// The cache that a standing of the run stands for; `compiled` are the policies of
/// --policy-source. Throws std::runtime_error if this build lacks the policy or it came from
/// another text.
CacheConfig config_of(const Run& run, const Ballot& ballot, const MetricTable& metric_table,
                      std::size_t standing, const CompiledPolicies& compiled = {});

/// The policy file of the ballot's winner, with the evidence.
PolicyFile policy_file_of(const Run& run, const MetricTable& metric_table, const Ballot& ballot,
                          const CompiledPolicies& compiled = {});

// The first of a ballot in the end-to-end evaluation: the order that decides, and what do not
// differ significantly.

/// What the end-to-end evaluation said of one standing.
struct Confirmed {
  std::size_t standing;  ///< of the ballot
  EvalScore score;
  Difference behind;  ///< its KL minus the choice's, paired over the same tokens
  bool over_budget;   ///< over the budget

  bool is_similar() const { return !over_budget && !behind.significantly_different(); }
};

/// What an evaluation of the full cache and the ballot's first standings, in their order, says: the
/// least KL first, and behind them those over budget. Its winner becomes the ballot's.
std::vector<Confirmed> confirm(const Evaluation& evaluation, Ballot& ballot);

/// One object an entry, with `behind` and `not_significantly_different`.
nlohmann::ordered_json confirmed_json(const std::vector<Confirmed>& confirmed,
                                      const MetricTable& metric_table, const Ballot& ballot);

// Two criteria of a policy, the distribution and the answers: those that are near in KL are asked
// questions, and one is deployed by both.

/// KL that better answers may cost: that of the deployed over the least.
inline constexpr double kNearKl = 1.2;
/// Shares of right answers that differ by no more are taken for alike.
inline constexpr double kAlikeShare = 0.05;

/// A task, and how long its contexts are.
struct PlannedTask {
  TaskSpec spec;
  std::uint32_t words = 250;  ///< 0: the task is skipped
};

/// What finalists are asked, each later than the eviction (query-agnostic).
struct TaskAccuracyPlan {
  std::vector<PlannedTask> tasks;  ///< the first decides first; none: task accuracy is not measured
  std::uint32_t samples = 8;       ///< at each of five depths
  std::uint64_t seed = 0;
  std::optional<ChatFrame> chat = std::nullopt;
  std::uint32_t max_rows = 64;  ///< caches side by side
  double rate = 0;              ///< seconds for a unit of task_accuracy_work(), as measured
};

/// Halves the words of each task until the full cache answers four of five questions; 0 where it
/// does at no length. Takes the time of it.
void find_lengths(Backend& backend, const Tokenizer& tokenizer, TaskAccuracyPlan& plan);

/// What may be deployed.
struct Finalist {
  CacheConfig config;
  double kl;  ///< nats, over texts that all have in common, or scaled to those of the first
};

/// What one task said: [finalist][sample], nothing of those that were not asked all of it.
struct TaskAccuracy {
  std::string task;
  std::uint32_t words = 0;      ///< 0: the task was skipped
  std::vector<bool> full = {};  ///< [sample]
  std::vector<std::vector<bool>> right = {};

  std::size_t samples() const { return full.size(); }
  bool has(std::size_t finalist) const { return !right[finalist].empty(); }
};
double share_of(const std::vector<bool>& right);

/// Asks all of them; where they are many, all of them a quarter of the questions, and the best the
/// rest. `finalists`: the lowest KL first, which is evaluated in full. `progress` gets the share
/// that is done.
std::vector<TaskAccuracy> evaluate_finalists(Backend& backend, const Tokenizer& tokenizer,
                                             std::span<const Finalist> finalists,
                                             const TaskAccuracyPlan& plan,
                                             const std::function<void(double)>& progress);
/// How much work that is, in tokens of prompts: a cache behind one counts as a part of it.
double task_accuracy_work(std::size_t finalists, const TaskAccuracyPlan& plan);

/// Which finalist is named for which criterion; the first has the least KL.
struct Choice {
  std::optional<std::size_t> best_accuracy;  ///< none: the task was skipped
  std::size_t deployed = 0;
  std::string why;
};
/// Of those with the most right answers (by the first task, then by the next, within kAlikeShare)
/// the least KL answers best. Deployed is the one with the best task accuracy of those within
/// kNearKl.
Choice choose_by_both_criteria(std::span<const Finalist> finalists,
                               std::span<const TaskAccuracy> evaluated);

/// What a policy file says of it: `distribution`, `answers`, `deployed`, `why`, `asked`.
nlohmann::json criteria_json(std::span<const Finalist> finalists,
                             std::span<const TaskAccuracy> evaluated, const Choice& choice);
/// The same for people, a few lines.
std::string criteria_text(const nlohmann::json& criteria);

/// What a decoded token costs on a CUDA device, milliseconds: the full cache, then `config`.
/// `by_tokens` feeds token by token; the beginning of a text is enough.
nlohmann::json step_json(const SweepRunner& by_tokens, const std::vector<std::int32_t>& ids,
                         std::uint32_t prompt_tokens, const CacheConfig& config);

}  // namespace kvlab
