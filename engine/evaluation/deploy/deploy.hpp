// Makes a policy file from a run. The file contains the choice at a budget, its evidence, and the
// policies that do not differ significantly from it.
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
/// The policies of a run at one budget, ranked for deployment.
struct Ballot {
  BudgetColumn budget;
  const MetricInfo* metric;
  Ranking ranking;
  std::size_t winner = 0;  ///< index in the ranking's policies

  const std::vector<RankedPolicy>& ranked() const { return ranking.ranked; }
};

/// Ranks the policies of a run at `budget` (as requested in the run, or in tokens) by `metric`,
/// averaged over its traces. Oracles and `full` are left out. Throws std::invalid_argument for an
/// unknown metric, for traces of several models, for a budget that is not in the run (the message
/// names those that are), and for a budget that is not the same number of tokens for every trace.
Ballot rank_for_deployment(const Run& run, const MetricTable& metric_table,
                           const std::string& budget, const std::string& metric);

/// The configuration of a ranked policy. `compiled`: the policies of --policy-source. Throws
/// std::runtime_error if this build lacks the policy, or if the policy was compiled from a
/// different source.
CacheConfig config_of(const Run& run, const Ballot& ballot, const MetricTable& metric_table,
                      std::size_t rank, const CompiledPolicies& compiled = {});

/// The policy file of the ballot's winner, with the evidence.
PolicyFile policy_file_of(const Run& run, const MetricTable& metric_table, const Ballot& ballot,
                          const CompiledPolicies& compiled = {});

// Confirms the first policies of a ballot by the end-to-end evaluation. The order of these
// policies is then decided by the evaluation.

/// The end-to-end evaluation of one ranked policy.
struct Confirmed {
  std::size_t rank;  ///< index in the ballot's ranked policies
  EvalScore score;
  Difference from_choice;  ///< its KL minus the choice's, paired over the same tokens
  bool over_budget;        ///< whether it needs more memory than the budget

  bool is_similar() const { return !over_budget && !from_choice.significantly_different(); }
};

/// Orders the first policies of the ballot by `evaluation`, in which they and the full cache were
/// run: lowest KL first, and configurations over budget last. The first policy in this order
/// becomes the ballot's winner.
std::vector<Confirmed> confirm(const Evaluation& evaluation, Ballot& ballot);

/// One JSON object for each entry, with the keys `from_choice` and `not_significantly_different`.
nlohmann::ordered_json confirmed_json(const std::vector<Confirmed>& confirmed,
                                      const MetricTable& metric_table, const Ballot& ballot);

// Policies are compared by two criteria, KL and task accuracy. Task accuracy is measured for the
// policies whose KL is near the lowest. Both criteria together decide which policy is deployed.

/// A policy may be deployed for its task accuracy if its KL is at most this multiple of the lowest
/// KL.
inline constexpr double kNearKl = 1.2;
/// Shares of right answers that differ by at most this much count as equal.
inline constexpr double kAlikeShare = 0.05;

/// A task, and the length of its contexts.
struct PlannedTask {
  TaskSpec spec;
  std::uint32_t words = 250;  ///< 0: the task is skipped
};

/// How task accuracy of the finalists is measured. Each question comes after the eviction
/// (query-agnostic).
struct TaskAccuracyPlan {
  std::vector<PlannedTask> tasks;  ///< in order of priority; empty: task accuracy is not measured
  std::uint32_t samples = 8;       ///< at each of five depths
  std::uint64_t seed = 0;
  std::optional<ChatFrame> chat = std::nullopt;
  std::uint32_t max_rows = 64;  ///< caches in a batch
  double rate = 0;              ///< measured seconds per unit of task_accuracy_work()
};

/// Halves the length of each task until the full cache answers four of five questions. If the full
/// cache fails at every length tried, sets the length to 0. Also measures the rate.
void find_lengths(Backend& backend, const Tokenizer& tokenizer, TaskAccuracyPlan& plan);

/// A configuration that may be deployed.
struct Finalist {
  CacheConfig config;
  double kl;  ///< mean KL in nats over the texts of the first finalist; estimated from the texts
              ///< that both ran if this finalist ran fewer
};

/// The answers to one task, [finalist][sample]. A finalist that was not given all questions has no
/// answers.
struct TaskAccuracy {
  std::string task;
  std::uint32_t words = 0;      ///< 0: the task was skipped
  std::vector<bool> full = {};  ///< [sample]
  std::vector<std::vector<bool>> right = {};

  std::size_t samples() const { return full.size(); }
  bool has(std::size_t finalist) const { return !right[finalist].empty(); }
};
double share_of(const std::vector<bool>& right);

/// Evaluates the finalists. If there are many, all of them answer a quarter of the questions, and
/// only the best ones answer the rest. `finalists`: the choice by KL, which always answers all
/// questions, and then the others with ascending KL. `progress` is called with the fraction done.
std::vector<TaskAccuracy> evaluate_finalists(Backend& backend, const Tokenizer& tokenizer,
                                             std::span<const Finalist> finalists,
                                             const TaskAccuracyPlan& plan,
                                             const std::function<void(double)>& progress);
/// The work of evaluate_finalists(), in prompt tokens. Each cache that answers after a prompt adds
/// a share of the prompt's tokens.
double task_accuracy_work(std::size_t finalists, const TaskAccuracyPlan& plan);

/// The best finalist by task accuracy, and the finalist to deploy. The first finalist is the choice
/// by KL. It need not have the lowest KL: among policies whose KL does not differ significantly,
/// less memory may decide.
struct Choice {
  std::optional<std::size_t> best_accuracy;  ///< nullopt if every task was skipped
  std::size_t deployed = 0;
  std::string why;
};
/// best_accuracy: keeps the finalists whose share of right answers in the first task is within
/// kAlikeShare of the highest, then filters these by the next task, and so on. Of those that
/// remain, takes the first finalist or, if it does not remain, the one with the lowest KL.
/// deployed: by the same rule, but only among the finalists whose KL is within kNearKl of the
/// lowest.
Choice choose_by_both_criteria(std::span<const Finalist> finalists,
                               std::span<const TaskAccuracy> evaluated);

/// The choice for a policy file, with the keys `distribution`, `task_accuracy`, `deployed`, `why`
/// and `evaluated`.
nlohmann::json criteria_json(std::span<const Finalist> finalists,
                             std::span<const TaskAccuracy> evaluated, const Choice& choice);
/// The same for people to read, in a few lines.
std::string criteria_text(const nlohmann::json& criteria);

/// Milliseconds for a decoded token on a CUDA device, for the full cache and for `config`.
/// `by_tokens` runs token by token, so `ids` may be just the beginning of a text.
nlohmann::json step_json(const SweepRunner& by_tokens, const std::vector<std::int32_t>& ids,
                         std::uint32_t prompt_tokens, const CacheConfig& config);

}  // namespace kvlab
