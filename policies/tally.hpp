// Converts rows of probabilities to the observations of live tokens. The replay and the decoder on
// the host both use this code, so their counts are the same.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "policies/aged_set.hpp"

namespace kvlab {

/// The attention statistics that live tokens receive from some queries of one append. Counts are
/// integer sums, so tallies of parts may be merged in any order. Only the counts that the policy
/// needs are computed.
class Tally {
 public:
  Tally() = default;
  /// Makes a tally of the `tokens` oldest live tokens. `live` must outlive the tally.
  Tally(const AgedSet& live, std::uint32_t threshold16, std::uint32_t tokens);

  /// Adds a row of probabilities, by age of the tokens. Call it once for each query head, in order,
  /// and then end_query(). The row may not be longer than the tally. `age` is the number of younger
  /// queries in the append.
  void add_row(std::span<const float> p, std::uint32_t age);
  /// Call after all heads of the query at `position` have been added.
  void end_query(std::uint32_t position);
  /// Adds the counts of another tally, which may not be longer than this one.
  void merge(const Tally& part);
  /// Sets for each token how many of the append's `count` queries could see it. The last `count`
  /// tokens are those of the append.
  void set_queries(std::uint32_t count);

  /// The observations, by age; empty if the policy needs none.
  std::span<const Observation> observations() const { return seen_; }
  /// Mass by query head, [head, age]; empty unless the policy observes each head.
  std::span<const std::uint64_t> heads() const { return heads_; }

 private:
  std::uint64_t* masses_of(std::size_t head);

  Needs needs_ = Needs::nothing;
  const AgedSet* live_ = nullptr;
  std::uint32_t threshold16_ = 0;
  std::vector<Observation> seen_;
  std::vector<std::uint64_t> largest_;   // with group=max: largest mass of this query's heads
  std::vector<std::uint8_t> requested_;  // [age]: requested by some head of this query
  std::vector<std::uint64_t> heads_;     // [head, age], if the policy observes each head
  std::size_t head_ = 0;                 // index of the query's next head
};

}  // namespace kvlab
