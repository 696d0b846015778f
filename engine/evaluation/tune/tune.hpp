// `kvlab tune`: from texts to a policy file. The offline replay puts a sweep in order, a halving in
// the end-to-end evaluation settles who is nearest to the full cache's distribution, and those that
// are near answer questions: one is deployed by both.
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

// The sweep that `kvlab tune` searches: policies with their protected tokens and parameters varied.

/// The policies that stand where none is named: all that evict but `random`, those with features,
/// which not every device has, and those that keep all they decode (`once`).
std::vector<std::string> tunable_policies(const CompiledPolicies& compiled);

/// `text` as requested where it names settings ("h2o:recent=25%"). A bare name stands for its
/// variants: 0 and 4 sinks, and the policy's own; shares of 25, 50, 75 and 90% that are recent (not
/// where the oldest leave anyway), and the policy's own; and each parameter, one at a time, at its
/// default and nearby within its range. The policy's own modifiers stay. Variants whose protected
/// tokens do not fit the budget are left out. Throws std::invalid_argument for what parse_policy()
/// refuses, and a policy that never evicts.
std::vector<PolicySpec> policy_variants(const std::string& text, std::uint32_t budget_tokens,
                                        const CompiledPolicies& compiled);

/// Values of a parameter around its default, ascending, within its range.
std::vector<double> parameter_values(double standard, double least, double most);

struct TuneRequest {
  std::vector<EvalText> texts;
  std::vector<CacheConfig> sweep;  ///< all at one budget
  std::string metric;              ///< of the offline replay; empty: what `deploy` goes by
  double share = 0.25;             ///< of the exhaustive end-to-end evaluation's work
  bool every_output_error = false;
  unsigned threads = 1;
  HeadReplayer* device = nullptr;
  TaskAccuracyPlan task_accuracy;  ///< without tasks: task accuracy is not measured
  SweepRunner by_tokens = {};      ///< what says the cost of a step, on a CUDA device; else empty
  std::function<void(double)> progress;
};

/// What one configuration scored on one text: means over its scored tokens.
struct TuneScore {
  std::size_t text;
  std::uint64_t tokens;
  double kl, nll, same_first;
};

struct Tuning {
  std::string metric;
  std::vector<double> cost;        ///< [configuration], mean over texts, lower being better
  std::vector<Memory> memory;      ///< [configuration]
  Memory full_memory;              ///< of the full cache
  std::vector<std::size_t> order;  ///< the first of each policy by that metric, then the others,
                                   ///< less those that are over budget
  std::vector<std::size_t> over_budget;        ///< those
  Halving halving;                             ///< configurations are places in `order`
  std::vector<std::vector<TuneScore>> scores;  ///< [configuration]; behind the sweep the full cache
  std::vector<std::size_t> finalists;          ///< of the sweep, the winner in KL first
  std::vector<TaskAccuracy> evaluated;
  Choice choice;             ///< of the finalists
  std::size_t winner = 0;    ///< of the sweep: what is deployed
  nlohmann::json step = {};  ///< step_json(); null without a GPU
  std::size_t budget_tokens = 0;
  /// Who entered the last round, by KL.
  std::vector<std::size_t> judged_configs;  ///< [candidate], of the sweep
  Recommendation recommendation;            ///< by KL

  /// Those of the sweep whose KL is not significantly different from the choice's, which is first.
  std::vector<std::size_t> similar() const;
};

/// Throws std::invalid_argument: a metric that the texts lack, a sweep of fewer than two, a budget
/// that is not the same number of tokens for every text.
Tuning tune(Backend& backend, const SweepRunner& run_sweep, const OutputSketch& sketch,
            const Tokenizer& tokenizer, const TuneRequest& request);

/// The policy file of the winner, with the evidence.
PolicyFile policy_file_of(const Tuning& tuning, const TuneRequest& request, const Backend& backend);

}  // namespace kvlab
