// Decides which configuration to choose at a budget, and why. All comparisons of configurations are
// here; the terminal, pages, JSON and Python show the result. Scores are paired:
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
/// Whether mean and peak are at most 2% above those of `other`.
bool needs_no_more_memory(const Memory& own, const Memory& other);

/// A configuration that is compared at a budget.
struct Candidate {
  std::string name;
  double error = 0;  ///< mean of the metric; negated if higher is better
  Memory memory = {};
};

/// The error of candidate `a` minus that of candidate `b`.
using DifferenceOf = std::function<Difference(std::size_t a, std::size_t b)>;

/// The data on which candidates were measured.
struct ComparisonScope {
  std::string budget;             ///< as given: "64", "20%"
  double budget_bytes = 0;        ///< 0: unknown
  double full_bytes = 0;          ///< mean of the full cache; 0: unknown
  std::string metric;             ///< "KL"
  bool higher_is_better = false;  ///< if true, errors are negated means
  std::size_t texts = 0;          ///< number of different texts
  std::uint64_t tokens = 0;       ///< number of scored tokens; 0: unknown
  std::uint64_t samples = 0;      ///< samples of a task, in place of texts
  std::string note = {};          ///< a sentence about what was not measured
  /// Policies to which protected tokens leave nothing to decide.
  std::vector<std::string> filled = {};

  std::string budget_text() const;  ///< "64 tokens", "20%"
};
/// Scored tokens; with fewer, intervals are wide.
inline constexpr std::uint64_t kEnoughTokens = 1000;

/// The configuration to choose at a budget. Indices refer to `candidates`.
struct Recommendation {
  ComparisonScope scope;
  std::vector<Candidate> candidates;
  /// Eligible candidates: peak memory within the budget. Lowest mean first, equal means by name.
  /// All candidates if none is eligible.
  std::vector<std::size_t> order;
  std::vector<Difference> behind;        ///< [order]: its error minus that of the lowest mean
  std::vector<Difference> from_choice;   ///< [order]: its error minus the choice's
  std::vector<std::size_t> over_budget;  ///< the other candidates, lowest mean first; never chosen
  std::vector<std::size_t> frontier;     ///< of all candidates, by bytes: those that none dominates
  std::size_t choice = 0;                ///< index in `candidates`
  std::optional<std::size_t> runner_up;  ///< the lowest mean of the other eligible candidates
  bool for_memory = false;               ///< chosen over a lower mean, because it needs less memory
  bool none_eligible = false;            ///< every candidate is over the budget

  bool empty() const { return candidates.empty(); }
  const Candidate& chosen_candidate() const { return candidates[choice]; }
  /// The metric's mean in display form (not negated).
  double mean(std::size_t candidate) const;
  /// The error of an eligible candidate minus the choice's.
  const Difference& difference(std::size_t candidate) const;
  /// Eligible candidates that do not differ significantly from the choice, lowest mean first.
  std::vector<std::size_t> similar() const;
};

/// Whether to compute Recommendation::frontier, which compares all pairs of candidates.
enum class Frontier { compute, skip };

/// Eligible are candidates whose peak is at most 1.02 times `scope.budget_bytes`. Chooses the
/// lowest mean. If other candidates need at least 2% less memory (mean), and their difference from
/// the lowest mean is known and not significant, chooses the one of them that needs least. Ties are
/// decided by name. Throws std::invalid_argument if there are no candidates.
Recommendation recommend(std::vector<Candidate> candidates, ComparisonScope scope,
                         const DifferenceOf& difference, Frontier frontier = Frontier::compute);

/// Index of the first budget whose choice is significantly better than its runner-up, otherwise 0.
/// `recommendations` are ordered by tokens and must not be empty.
std::size_t decisive_budget(std::span<const Recommendation> recommendations);

/// Whether protected tokens (sinks and recent) fill the budget, so that the policy equals `window`
/// with sinks, whatever its name. `params` is in the form of results.
bool protected_tokens_fill(std::string_view policy, std::string_view params,
                           std::uint32_t budget_tokens);

}  // namespace kvlab
