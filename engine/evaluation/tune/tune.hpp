// `kvlab tune`: makes a policy file from texts. The offline replay orders the configurations of a
// sweep, successive halving in the end-to-end evaluation finds the lowest KL, and configurations
// with nearly the lowest KL answer questions. KL and task accuracy together decide which
// configuration is deployed.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "engine/evaluation/deploy/deploy.hpp"
#include "engine/evaluation/fidelity/fidelity.hpp"
#include "engine/evaluation/policy_file.hpp"
#include "engine/evaluation/tune/halving.hpp"
#include "policies/catalogue.hpp"

namespace kvlab {

// The sweep that `kvlab tune` searches: policies with varied protected tokens and parameters.

/// The policies that take part if the user names none. These are all policies that evict, except
/// `random`, policies with features (which not every device supports), and policies that keep all
/// decoded tokens (`once`).
std::vector<std::string> tunable_policies(const CompiledPolicies& compiled);

/// The variants of a policy. If `text` has settings ("h2o:recent=25%"), it is the only variant. If
/// `text` is just a policy's name, the variants combine sinks (0, 4 and the policy's default) with
/// recent tokens (25, 50, 75 and 90%, and the policy's default). A policy that evicts the oldest
/// token first gets only its default recent tokens, because others make no difference. Each
/// combination is also tried with one parameter changed to values near its default. Modifiers keep
/// their defaults. Variants whose protected tokens do not fit the budget are left out. Throws
/// std::invalid_argument as parse_policy() does, and for a policy that never evicts.
std::vector<PolicySpec> policy_variants(const std::string& text, std::uint32_t budget_tokens,
                                        const CompiledPolicies& compiled);

/// Values of a parameter around its default, ascending, within its range.
std::vector<double> parameter_values(double standard, double min_value, double max_value);

struct TuneRequest {
  std::vector<EvalText> texts;
  std::vector<CacheConfig> sweep;  ///< all at one budget
  std::string metric;   ///< metric of the offline replay; empty: the one that `deploy` uses
  double share = 0.25;  ///< limit of the work, as a share of the exhaustive end-to-end evaluation
  bool every_output_error = false;
  unsigned threads = 1;
  HeadReplayer* device = nullptr;
  TaskAccuracyPlan task_accuracy;  ///< without tasks, task accuracy is not measured
  SweepRunner by_tokens = {};      ///< measures the time of a step on a CUDA device; else empty
  std::function<void(double)> progress;
};

/// The scores of one configuration on one text: means over its scored tokens.
struct TuneScore {
  std::size_t text;
  std::uint64_t tokens;
  double kl, nll, same_first;
};

struct Tuning {
  std::string metric;
  std::vector<double> cost;        ///< [configuration], mean over texts, lower is better
  std::vector<Memory> memory;      ///< [configuration]
  Memory full_memory;              ///< memory of the full cache
  std::vector<std::size_t> order;  ///< configurations within the budget: the best variant and the
                                   ///< defaults of each policy, then the others, both by `metric`
  std::vector<std::size_t> over_budget;        ///< configurations over budget
  Halving halving;                             ///< its configurations are indices in `order`
  std::vector<std::vector<TuneScore>> scores;  ///< [configuration]; the last one is the full cache
  /// Indices in the sweep: the choice by KL, then the others by ascending KL.
  std::vector<std::size_t> finalists;
  std::vector<TaskAccuracy> evaluated;
  Choice choice;             ///< choice among the finalists
  std::size_t winner = 0;    ///< index in the sweep of the configuration that is deployed
  nlohmann::json step = {};  ///< step_json(); null without a GPU
  std::size_t budget_tokens = 0;
  /// The configurations of the last round, compared by KL.
  std::vector<std::size_t> judged_configs;  ///< [candidate]: index in the sweep
  Recommendation recommendation;            ///< by KL

  /// Configurations of the sweep whose KL does not differ significantly from the choice's; the
  /// choice is first.
  std::vector<std::size_t> similar() const;
};

/// Runs `kvlab tune`. Throws std::invalid_argument for a metric that the texts lack, for a sweep of
/// fewer than two configurations, and for a budget that is not the same number of tokens for every
/// text.
Tuning tune(Backend& backend, const SweepRunner& run_sweep, const OutputSketch& sketch,
            const Tokenizer& tokenizer, const TuneRequest& request);

/// The policy file of the deployed configuration, with the evidence.
PolicyFile policy_file_of(const Tuning& tuning, const TuneRequest& request, const Backend& backend);

}  // namespace kvlab
