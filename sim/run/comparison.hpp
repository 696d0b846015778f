// Decides which configuration to choose at a budget, and why. All comparisons of configurations are
// made here. The terminal, pages, JSON and Python only show the results. Scores are compared in
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

#include "policies/cache_config.hpp"
#include "sim/live_counts.hpp"
#include "sim/run/paired_scores.hpp"

namespace kvlab {

inline constexpr double kSameMemory = 1.02;
/// Whether the mean and the peak of `own` exceed those of `other` by at most 2%.
bool needs_no_more_memory(const Memory& own, const Memory& other);

/// A configuration that is compared at a budget.
struct Candidate {
  std::string name;
  /// Mean of the metric, negated if higher is better, so that lower is always better.
  double error = 0;
  Memory memory = {};
};

/// The memory of a budget at which several candidates are compared: the largest memory of their
/// budgets, because a tier plan leaves some bytes unused. A policy with `prompt` keeps the prompt
/// in addition to its budget, so the others may not use that memory. It counts only if all
/// candidates have `prompt`.
class BudgetBytes {
 public:
  void add(double bytes, bool keeps_prompt) {
    double& own = keeps_prompt ? with_prompt_ : without_prompt_;
    own = own > bytes ? own : bytes;
  }
  double bytes() const { return without_prompt_ > 0 ? without_prompt_ : with_prompt_; }

 private:
  double with_prompt_ = 0, without_prompt_ = 0;
};
/// Whether a policy with these settings keeps the whole prompt. `params` has the form of the column
/// `params` of results.csv.
bool keeps_prompt(std::string_view params);

/// The error of candidate `a` minus that of candidate `b`.
using DifferenceOf = std::function<Difference(std::size_t a, std::size_t b)>;

/// The budget, the metric and the data with which candidates were compared.
struct ComparisonScope {
  std::string budget;             ///< as requested: "64", "20%"
  double budget_bytes = 0;        ///< 0: unknown
  double full_bytes = 0;          ///< mean memory of the full cache; 0: unknown
  std::string metric;             ///< "KL"
  bool higher_is_better = false;  ///< if true, errors are negated means
  std::size_t texts = 0;          ///< number of different texts
  std::uint64_t tokens = 0;       ///< number of scored tokens; 0: unknown
  std::uint64_t samples = 0;      ///< number of samples of a task; 0 if texts were scored
  std::string note = {};          ///< a sentence about what was not measured
  /// Policies for which protected tokens fill the budget, so that their ranks have no effect.
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
  /// [order]: the error of the candidate minus that of the candidate with the lowest mean.
  std::vector<Difference> from_lowest;
  std::vector<Difference> from_choice;  ///< [order]: its error minus the choice's
  /// Candidates that are not eligible, lowest mean first; never chosen.
  std::vector<std::size_t> over_budget;
  /// Candidates that no other candidate dominates, ordered by bytes.
  std::vector<std::size_t> frontier;
  std::size_t choice = 0;  ///< index in `candidates`
  /// The candidate with the lowest mean among the eligible ones other than the choice.
  std::optional<std::size_t> runner_up;
  /// Whether the choice was preferred to a candidate with a lower mean because it needs less
  /// memory.
  bool for_memory = false;
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

/// Makes the names of candidates different, because a stored recommendation identifies candidates
/// by their names. `configs` are the candidates' configurations. Appends to equal names the budget,
/// the prefill mode, the positions and the seed, each only if the configurations of the name differ
/// in it, as in "h2o (stream)".
void make_names_different(std::vector<Candidate>& candidates,
                          std::span<const CacheConfig* const> configs);

/// Recommends one of the eligible candidates: those whose peak memory is at most 1.02 times
/// `scope.budget_bytes`. By default, this is the candidate with the lowest mean. Exception: some
/// eligible candidates may need at least 2% less memory (mean over queries) than that candidate,
/// while their difference from it is known and not significant. Then it recommends the one of them
/// that needs the least memory. Equal candidates are ordered by name. Throws std::invalid_argument
/// if there are no candidates.
Recommendation recommend(std::vector<Candidate> candidates, ComparisonScope scope,
                         const DifferenceOf& difference, Frontier frontier = Frontier::compute);

/// Index of the budget for which summaries are written. It is one of the budgets at which the
/// choice is significantly better than the runner-up; if there is no such budget, it is any of the
/// budgets. Among these budgets, it is the one whose memory is nearest to a tenth of the full
/// cache's memory or, if memory is unknown, the first one. `recommendations` must be ordered by
/// tokens and must not be empty.
std::size_t decisive_budget(std::span<const Recommendation> recommendations);

/// Whether protected tokens (sinks and recent) fill the budget. Then any policy behaves like
/// `window` with sinks. `params` has the form of the column `params` of results.csv.
bool protected_tokens_fill(std::string_view policy, std::string_view params,
                           std::uint32_t budget_tokens);

}  // namespace kvlab
