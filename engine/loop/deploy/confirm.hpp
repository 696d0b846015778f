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

  bool ties() const { return !behind.told_apart(); }
};

/// What an evaluation of the full cache and the ballot's first standings, in their order, says: the
/// least KL first. Its winner, of those that cannot be told from the first, becomes the ballot's.
std::vector<Confirmed> confirm(const Evaluation& evaluation, const Figures& figures,
                               Ballot& ballot);

/// One object an entry, with `behind` and `ties_with_first`.
nlohmann::ordered_json confirmed_json(const std::vector<Confirmed>& confirmed,
                                      const Figures& figures, const Ballot& ballot);

}  // namespace kvlab
