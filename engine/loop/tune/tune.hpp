// `kvlab tune`: from texts to a policy file. The open loop puts a grid in order, a race in the
// closed loop settles who is nearest to the full cache's distribution, and those that are near
// answer questions: one is deployed by both.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "engine/loop/deploy/deploy.hpp"
#include "engine/loop/fidelity/fidelity.hpp"
#include "engine/loop/policy_file.hpp"
#include "engine/loop/tune/race.hpp"
#include "policies/catalogue.hpp"

namespace kvlab {

// The grid that `kvlab tune` searches: policies with their guards and parameters varied.

/// The policies that stand where none is named: all that evict but `random`, those with columns,
/// which not every device has, and those that keep all they decode (`once`).
std::vector<std::string> tunable_policies(const CompiledPolicies& compiled);

/// `text` as asked for where it names settings ("h2o:recent=25%"). A bare name stands for its
/// variants: 0 and 4 sinks, and the policy's own; shares of 25, 50, 75 and 90% that are recent (not
/// where the oldest leave anyway), and the policy's own; and each parameter, one at a time, at its
/// default and nearby within its range. The policy's own modifiers stay. Variants whose guards do
/// not fit the budget are left out. Throws std::invalid_argument for what parse_policy() refuses,
/// and a policy that never evicts.
std::vector<PolicySpec> policy_variants(const std::string& text, std::uint32_t budget_tokens,
                                        const CompiledPolicies& compiled);

/// Values of a parameter around its default, ascending, within its range.
std::vector<double> parameter_values(double standard, double least, double most);

struct TuneRequest {
  std::vector<LoopText> texts;
  std::vector<CacheConfig> grid;  ///< all at one budget
  std::string metric;             ///< of the open loop; empty: what `deploy` goes by
  double share = 0.25;            ///< of the exhaustive closed loop's work
  bool every_output_error = false;
  unsigned threads = 1;
  HeadReplayer* device = nullptr;
  AnswerPlan answers;    ///< without tasks: answers are not asked
  Sweep by_tokens = {};  ///< what says the cost of a step, on a CUDA device; else empty
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
  std::vector<double> figure;      ///< [configuration], mean over texts, lower being better
  std::vector<Memory> memory;      ///< [configuration]
  Memory full_memory;              ///< of the full cache
  std::vector<std::size_t> order;  ///< the first of each policy by that figure, then the others,
                                   ///< less those that hold more
  std::vector<std::size_t> more;   ///< those: than the budget
  Race race;                       ///< contenders are places in `order`
  std::vector<std::vector<TuneScore>> scores;  ///< [configuration]; behind the grid the full cache
  std::vector<std::size_t> finalists;          ///< of the grid, the winner in KL first
  std::vector<TaskAsked> asked;
  Choice choice;             ///< of the finalists
  std::size_t winner = 0;    ///< of the grid: who is deployed
  nlohmann::json step = {};  ///< step_json(); null without a card
  std::size_t budget_tokens = 0;
  /// Who entered the last round, by KL.
  std::vector<std::size_t> judged_configs;  ///< [candidate], of the grid
  Recommendation recommendation;            ///< by KL

  /// Those of the grid whose KL is not significantly different from the choice's, which is first.
  std::vector<std::size_t> tied() const;
};

/// Throws std::invalid_argument: a metric that the texts lack, a grid of fewer than two, a budget
/// that is not the same number of tokens for every text.
Tuning tune(Backend& backend, const Sweep& sweep, const OutputSketch& sketch,
            const Tokenizer& tokenizer, const TuneRequest& request);

/// The policy file of the winner, with the evidence.
PolicyFile policy_file_of(const Tuning& tuning, const TuneRequest& request, const Backend& backend);

}  // namespace kvlab
