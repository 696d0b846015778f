// `kvlab tune`: from texts to a policy file. The open loop puts a grid in order, a race in the
// closed loop settles it, and, if asked, a task decides among those that cannot be told apart.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "engine/loop/fidelity/measure.hpp"
#include "engine/loop/policy_file.hpp"
#include "engine/loop/task/run.hpp"
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
  std::optional<TaskRequest> task;  ///< its configurations are the finalists
  std::function<void(double)> progress;
};

/// One finalist's answers.
struct TuneAnswers {
  std::size_t config;  ///< of the grid; the grid's size: the full cache
  double right, log_likelihood;
};

struct Tuning {
  std::string metric;
  std::vector<double> figure;      ///< [configuration], mean over texts, lower being better
  std::vector<Memory> memory;      ///< [configuration]
  std::vector<std::size_t> order;  ///< the grid by that figure, less those that hold more
  std::vector<std::size_t> more;   ///< those: than the budget
  Race race;                       ///< contenders are places in `order`
  std::vector<TuneAnswers> answers;
  std::size_t winner = 0;  ///< of the grid
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
