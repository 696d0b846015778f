// From rows of probabilities to what each live token observed: its one home on the host, so that a
// replay and a decoder count alike.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "policies/aged_set.hpp"

namespace kvlab {

/// What the live tokens receive from some queries of one append. Sums of integers: tallies of
/// parts may be merged in any order. Counts only what the policy needs.
class Tally {
 public:
  Tally() = default;
  /// Of the first `tokens` live tokens by age. `live` must outlive the tally.
  Tally(const AgedSet& live, std::uint32_t threshold16, std::uint32_t tokens);

  /// A query head's row of probabilities, by age, no longer than the tally: of the query's heads
  /// the next. `age` counts the younger queries of the append.
  void add_row(std::span<const float> p, std::uint32_t age);
  /// All heads of the query at `position` have been added.
  void end_query(std::uint32_t position);
  /// Adds a part's counts; `part` is no longer than this.
  void merge(const Tally& part);
  /// Notes how many of the append's `count` queries could see each token; the last `count`
  /// tokens are the append's own.
  void set_queries(std::uint32_t count);

  /// By age; empty if the policy needs nothing.
  std::span<const Observation> observations() const { return seen_; }
  /// The mass from each query head, [head, age]; empty where the policy does not look at it.
  std::span<const std::uint64_t> heads() const { return heads_; }

 private:
  std::uint64_t* masses_of(std::size_t head);

  Needs needs_ = Needs::nothing;
  const AgedSet* live_ = nullptr;
  std::uint32_t threshold16_ = 0;
  std::vector<Observation> seen_;
  std::vector<std::uint64_t> largest_;   // under group=max: of this query's heads
  std::vector<std::uint8_t> requested_;  // requested by some head of this query
  std::vector<std::uint64_t> heads_;     // [head, age], where the policy looks at each
  std::size_t head_ = 0;                 // of the query's, that comes next
};

}  // namespace kvlab
