// `kvlab tune`: from texts to a policy file. The open loop puts a grid in order, a race in the
// closed loop settles who is nearest to the full cache's distribution, and those that are near
// answer questions: one is deployed by both.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "engine/loop/deploy/truths.hpp"
#include "engine/loop/fidelity/measure.hpp"
#include "engine/loop/policy_file.hpp"
#include "engine/loop/tune/race.hpp"

namespace kvlab {

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
  std::vector<std::size_t> judged_configs;  ///< [contender], of the grid
  std::vector<Contender> contenders;
  Verdict verdict;
  VerdictScope scope;

  /// Those of the grid that KL cannot tell from the race's first, which is the first of them.
  std::vector<std::size_t> tied() const;
};

/// Throws std::invalid_argument: a metric that the texts lack, a grid of fewer than two, a budget
/// that is not the same number of tokens for every text.
Tuning tune(Backend& backend, const Sweep& sweep, const OutputSketch& sketch,
            const Tokenizer& tokenizer, const TuneRequest& request);

/// The policy file of the winner, with the evidence.
PolicyFile policy_file_of(const Tuning& tuning, const TuneRequest& request, const Backend& backend);

}  // namespace kvlab
