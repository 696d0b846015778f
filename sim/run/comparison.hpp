// Decides which configuration to choose at a budget, and why. All comparisons of configurations are
// made here; the terminal, pages, JSON and Python only show the result. Scores are compared in
// pairs (sim/run/paired_scores.hpp).
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
/// Whether mean and peak exceed those of `other` by at most 2%.
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
  std::string budget;             ///< as requested: "64", "20%"
  double budget_bytes = 0;        ///< 0: unknown
  double full_bytes = 0;          ///< mean of the full cache; 0: unknown
  std::string metric;             ///< "KL"
  bool higher_is_better = false;  ///< if true, errors are negated means
  std::size_t texts = 0;          ///< number of different texts
  std::uint64_t tokens = 0;       ///< number of scored tokens; 0: unknown
  std::uint64_t samples = 0;      ///< number of samples of a task; 0 if texts were scored
  std::string note = {};          ///< a sentence about what was not measured
  /// Policies whose budget is filled by protected tokens, so that they have nothing to decide.
  std::vector<std::string> filled = {};

  std::string budget_text() const;  ///< "64 tokens", "20%"
};
/// Minimum number of scored tokens; with fewer tokens, intervals are wide.
inline constexpr std::uint64_t kEnoughTokens = 1000;

/// The configuration to choose at a budget. Indices refer to `candidates`.
struct Recommendation {
  ComparisonScope scope;
  std::vector<Candidate> candidates;
  /// The eligible candidates, whose peak memory is within the budget, ordered by mean (lowest
  /// first), then by name. If no candidate is eligible, all candidates.
  std::vector<std::size_t> order;
  std::vector<Difference> behind;  ///< [order]: the candidate's error minus that of the lowest mean
  std::vector<Difference> from_choice;  ///< [order]: the candidate's error minus that of the choice
  std::vector<std::size_t>
      over_budget;  ///< candidates that are not eligible, lowest mean first; never chosen
  std::vector<std::size_t>
      frontier;            ///< candidates that no other candidate dominates, ordered by bytes
  std::size_t choice = 0;  ///< index in `candidates`
  std::optional<std::size_t>
      runner_up;  ///< lowest mean of the eligible candidates other than the choice
  bool for_memory =
      false;  ///< whether it was chosen in place of a lower mean because it needs less memory
  bool none_eligible = false;  ///< every candidate is over the budget

  bool empty() const { return candidates.empty(); }
  const Candidate& chosen_candidate() const { return candidates[choice]; }
  /// The metric's mean in display form (not negated).
  double mean(std::size_t candidate) const;
  /// The error of an eligible candidate minus that of the choice.
  const Difference& difference(std::size_t candidate) const;
  /// Eligible candidates that do not differ significantly from the choice, lowest mean first.
  std::vector<std::size_t> similar() const;
};

/// Whether to compute Recommendation::frontier, for which all pairs of candidates are compared.
enum class Frontier { compute, skip };

/// A candidate is eligible if its peak is at most 1.02 times `scope.budget_bytes`. Chooses the
/// lowest mean. If there are candidates that need at least 2% less memory (mean), and whose
/// difference from the lowest mean is known and not significant, chooses the one of them that needs
/// the least memory. Names decide ties. Throws std::invalid_argument if there are no candidates.
Recommendation recommend(std::vector<Candidate> candidates, ComparisonScope scope,
                         const DifferenceOf& difference, Frontier frontier = Frontier::compute);

/// Index of the first budget whose choice is significantly better than its runner-up; 0 if there is
/// none. `recommendations` must be ordered by tokens and must not be empty.
std::size_t decisive_budget(std::span<const Recommendation> recommendations);

/// Whether protected tokens (sinks and recent) fill the budget, so that the policy behaves like
/// `window` with sinks, whatever its name is. `params` is in the form of results.
bool protected_tokens_fill(std::string_view policy, std::string_view params,
                           std::uint32_t budget_tokens);

}  // namespace kvlab
