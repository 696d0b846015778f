// From a run to a policy file: the winner at a budget, with its evidence and those that tie with
// it.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "engine/loop/eval.hpp"
#include "engine/loop/eval/score.hpp"
#include "engine/loop/policy_file.hpp"
#include "engine/loop/task/run.hpp"
#include "sim/run/ranking.hpp"
#include "sim/run/run.hpp"
#include "traces/base/json.hpp"

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
  Difference behind;  ///< its KL minus the choice's, paired over the same tokens
  bool holds_more;    ///< over the budget

  bool ties() const { return !holds_more && !behind.told_apart(); }
};

/// What an evaluation of the full cache and the ballot's first standings, in their order, says: the
/// least KL first, and behind them who holds more than the budget. Its winner becomes the ballot's.
std::vector<Confirmed> confirm(const Evaluation& evaluation, Ballot& ballot);

/// One object an entry, with `behind` and `ties_with_first`.
nlohmann::ordered_json confirmed_json(const std::vector<Confirmed>& confirmed,
                                      const Figures& figures, const Ballot& ballot);

// Two truths of a policy, the distribution and the answers: those that are near in KL are asked
// questions, and one is deployed by both.

/// KL that better answers may cost: that of the deployed over the least.
inline constexpr double kNearKl = 1.2;
/// Shares of right answers that differ by no more are taken for alike.
inline constexpr double kAlikeShare = 0.05;

/// A task, and how long its contexts are.
struct PlannedTask {
  TaskSpec spec;
  std::uint32_t words = 250;  ///< 0: nobody is asked
};

/// What finalists are asked, each later than the eviction (query-agnostic).
struct AnswerPlan {
  std::vector<PlannedTask> tasks;  ///< the first decides first; none: answers are not asked
  std::uint32_t draws = 8;         ///< at each of five depths
  std::uint64_t seed = 0;
  std::optional<ChatFrame> chat = std::nullopt;
  std::uint32_t most_rows = 64;  ///< caches side by side
  double rate = 0;               ///< seconds for a unit of answer_work(), as measured
};

/// Halves the words of each task until the full cache answers four of five questions; 0 where it
/// does at no length. Takes the time of it.
void find_lengths(Backend& backend, const Tokenizer& tokenizer, AnswerPlan& plan);

/// Who may be deployed.
struct Finalist {
  CacheConfig config;
  double kl;  ///< nats, over texts that all have in common, or scaled to those of the first
};

/// What one task said: [finalist][draw], nothing of those that were not asked all of it.
struct TaskAsked {
  std::string task;
  std::uint32_t words = 0;      ///< 0: nobody was asked
  std::vector<bool> full = {};  ///< [draw]
  std::vector<std::vector<bool>> right = {};

  std::size_t draws() const { return full.size(); }
  bool has(std::size_t finalist) const { return !right[finalist].empty(); }
};
double share_of(const std::vector<bool>& right);

/// Asks all of them; where they are many, all of them a quarter of the questions, and the best the
/// rest. `finalists`: the least KL first, who is asked all. `progress` gets the share that is done.
std::vector<TaskAsked> ask_finalists(Backend& backend, const Tokenizer& tokenizer,
                                     std::span<const Finalist> finalists, const AnswerPlan& plan,
                                     const std::function<void(double)>& progress);
/// How much work that is, in tokens of prompts: a cache behind one counts as a part of it.
double answer_work(std::size_t finalists, const AnswerPlan& plan);

/// Who is named for what, of the finalists; the first has the least KL.
struct Choice {
  std::optional<std::size_t> answers;  ///< none: nobody was asked
  std::size_t deployed = 0;
  std::string why;
};
/// Of those with the most right answers (by the first task, then by the next, within kAlikeShare)
/// the least KL answers best. Deployed is who answers best of those within kNearKl.
Choice choose_by_both(std::span<const Finalist> finalists, std::span<const TaskAsked> asked);

/// What a policy file says of it: `distribution`, `answers`, `deployed`, `why`, `asked`.
nlohmann::json truths_json(std::span<const Finalist> finalists, std::span<const TaskAsked> asked,
                           const Choice& choice);
/// The same for people, a few lines.
std::string truths_text(const nlohmann::json& truths);

/// What a decoded token costs on a CUDA device, milliseconds: the full cache, then `config`.
/// `by_tokens` feeds token by token; the beginning of a text is enough.
nlohmann::json step_json(const Sweep& by_tokens, const std::vector<std::int32_t>& ids,
                         std::uint32_t prompt_tokens, const CacheConfig& config);

}  // namespace kvlab
