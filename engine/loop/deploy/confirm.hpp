// The first of a ballot in the closed loop: the order that decides, and what cannot be told apart.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <vector>

#include "engine/loop/deploy/deploy.hpp"
#include "engine/loop/eval/score.hpp"

namespace kvlab {

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
