// What can be told apart, and what is said of it: the one place where two configurations are
// compared. Figures are paired: sim/run/paired_scores.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sim/live_counts.hpp"
#include "sim/run/paired_scores.hpp"

namespace kvlab {

inline constexpr double kSameMemory = 1.02;
/// Mean and peak are at most those of `other`, but for 2%.
bool holds_no_more(const Memory& own, const Memory& other);
inline bool same_memory(const Memory& a, const Memory& b) {
  return holds_no_more(a, b) && holds_no_more(b, a);
}

/// A configuration that is to be judged, in the order of the grid.
struct Contender {
  std::string name;
  double error = 0;  ///< lower is better
  Memory memory = {};
  bool last_resort = false;  ///< taken only where no other ties
};
/// Whether it is: `random`, which knows nothing.
inline bool is_last_resort(std::string_view policy) { return policy == "random"; }

/// The error of the `a`-th less that of the `b`-th.
using DifferenceOf = std::function<Difference(std::size_t a, std::size_t b)>;

/// What is said of contenders at a budget. Indices are of the contenders as given.
struct Verdict {
  std::vector<std::size_t> order;  ///< those that hold no more than the budget, least error first;
                                   ///< all, where none holds as little
  std::vector<Difference> behind;  ///< [order]: its error less that of the first
  std::vector<std::size_t> tied;   ///< with the first, of least memory: the winner in front
  std::vector<std::size_t> more;   ///< those that hold more: never better, whatever their error
  std::vector<std::size_t> frontier;  ///< of all, by bytes: those that none dominates, which is to
                                      ///< hold no more and to be told apart as better
  bool over_budget = false;           ///< none holds as little as the budget

  std::size_t winner() const { return tied.front(); }
  bool ties(std::size_t contender) const;  ///< whether it is among `tied`
};

/// `budget_bytes`: what the budget's tokens take; a contender's peak may be 2% more. Throws
/// std::invalid_argument of none.
Verdict verdict_of(std::span<const Contender> contenders, double budget_bytes,
                   const DifferenceOf& difference);

/// What a verdict was given on.
struct VerdictScope {
  std::string budget;                    ///< "64 tokens"
  double budget_bytes = 0;               ///< 0: not known
  std::string figure;                    ///< "KL"
  std::size_t texts = 0;                 ///< different ones
  std::uint64_t tokens = 0;              ///< scored; 0: not known
  std::uint64_t draws = 0;               ///< of a task, instead of texts
  std::string unmeasured = {};           ///< "answers were not asked"
  std::vector<std::string> filled = {};  ///< whose guards leave a policy nothing to decide
};
inline constexpr std::uint64_t kEnoughTokens = 1000;  ///< scored ones; fewer tell little apart

/// Whether all that a policy may keep is guarded, sinks and the most recent tokens, so that it is
/// `window` with sinks whatever its name; `params` as results have them.
bool guards_fill(std::string_view policy, std::string_view params, std::uint32_t budget_tokens);

}  // namespace kvlab
