// Which configuration to choose at a budget, and why: the one place where configurations are
// compared. The terminal, pages, JSON and Python show what it decided. Scores are paired:
// sim/run/paired_scores.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sim/live_counts.hpp"
#include "sim/run/paired_scores.hpp"

namespace kvlab {

inline constexpr double kSameMemory = 1.02;
/// Mean and peak are at most those of `other`, but for 2%.
bool needs_no_more_memory(const Memory& own, const Memory& other);

/// A configuration that is compared at a budget.
struct Candidate {
  std::string name;
  double error = 0;  ///< mean of the metric, negated where higher is better
  Memory memory = {};
};

/// The error of the `a`-th minus that of the `b`-th.
using DifferenceOf = std::function<Difference(std::size_t a, std::size_t b)>;

/// What candidates were measured on.
struct ComparisonScope {
  std::string budget;             ///< as given: "64", "20%"
  double budget_bytes = 0;        ///< 0: not known
  double full_bytes = 0;          ///< of the full cache, mean; 0: not known
  std::string metric;             ///< "KL"
  bool higher_is_better = false;  ///< then errors are negated means
  std::size_t texts = 0;          ///< different ones
  std::uint64_t tokens = 0;       ///< scored; 0: not known
  std::uint64_t samples = 0;      ///< of a task, instead of texts
  std::string note = {};          ///< a sentence about what was not measured
  std::vector<std::string> filled =
      {};  ///< whose protected tokens leave a policy nothing to decide

  std::string budget_text() const;  ///< "64 tokens", "20%"
};
inline constexpr std::uint64_t kEnoughTokens = 1000;  ///< scored; with fewer, intervals are wide

/// What to choose at a budget. Indices are of `candidates`.
struct Recommendation {
  ComparisonScope scope;
  std::vector<Candidate> candidates;
  std::vector<std::size_t> order;  ///< eligible: peak memory within the budget; lowest mean first,
                                   ///< equal means by name. All, where none is eligible
  std::vector<Difference> behind;  ///< [order]: its error minus that of the lowest mean
  std::vector<Difference> from_choice;   ///< [order]: its error minus the choice's
  std::vector<std::size_t> over_budget;  ///< the others, lowest mean first: never chosen
  std::vector<std::size_t> frontier;     ///< of all, by bytes: those that none dominates
  std::size_t choice = 0;                ///< of `candidates`
  std::optional<std::size_t> runner_up;  ///< lowest mean of the other eligible ones
  bool for_memory = false;     ///< another mean is lower, but the choice needs less memory
  bool none_eligible = false;  ///< every candidate is over the budget

  bool empty() const { return candidates.empty(); }
  const Candidate& chosen_candidate() const { return candidates[choice]; }
  /// The metric's mean, as it is shown.
  double mean(std::size_t candidate) const;
  /// The candidate's error minus the choice's; of an eligible one.
  const Difference& difference(std::size_t candidate) const;
  /// Eligible ones whose difference from the choice is not significant, lowest mean first.
  std::vector<std::size_t> similar() const;
};

/// Whether to compute Recommendation::frontier, which compares every two candidates.
enum class Frontier { compute, skip };

/// Eligible are candidates whose peak is at most 1.02 times `scope.budget_bytes`. Chosen is the
/// lowest mean; if others whose difference from it is known and not significant need at least 2%
/// less memory (mean), the one of them that needs least. Equal ones are chosen by name. Throws
/// std::invalid_argument of no candidates.
Recommendation recommend(std::vector<Candidate> candidates, ComparisonScope scope,
                         const DifferenceOf& difference, Frontier frontier = Frontier::compute);

/// The first budget whose choice is significantly better than its runner-up, or else the first.
/// `recommendations` by tokens; must not be empty.
std::size_t decisive_budget(std::span<const Recommendation> recommendations);

/// Whether all that a policy may keep is protected, sinks and the most recent tokens, so that it is
/// `window` with sinks whatever its name; `params` as results have them.
bool protected_tokens_fill(std::string_view policy, std::string_view params,
                           std::uint32_t budget_tokens);

}  // namespace kvlab
