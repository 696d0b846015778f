// Recall and misses of some live sets on one KV head, summed over some queries before they enter
// their figures: one logarithm for all of them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sim/lanes/loops/row_loops.hpp"
#include "sim/metrics.hpp"

namespace kvlab {

class RecallTally {
 public:
  RecallTally(std::size_t sets, std::uint32_t group)
      : group_(group),
        heads_((group + kQuad - 1) / kQuad * kQuad),
        recall_(sets * heads_),
        product_(sets * heads_, 1.0),
        missed_(sets * heads_),
        wanted_(heads_) {}

  /// Before a query's figures: `block` is the one of the span that it lies in, wanted [group] what
  /// each head requests. `stats`: of every set.
  void begin_query(std::uint32_t block, const std::uint32_t* wanted, std::span<HeadStats> stats);
  /// One set at one head.
  void add(std::size_t set, std::uint32_t head, double recall, double missed);
  /// All sets, the i-th with sums [i][heads] of the row's exponentials and hits [i][heads] among
  /// what it requests; `full` [heads]: the row's sums; `own` [heads]: 1 where a hit is not meant.
  /// From set `whole` on they have the row entire.
  void add_all(const double* sums, const std::uint32_t* hits, const float* full,
               const std::uint32_t* wanted, const std::uint32_t* own, std::size_t whole);
  /// Hands what there is to the figures of every set.
  void flush(std::span<HeadStats> stats);

 private:
  static constexpr std::uint32_t kMostQueries = 32;  // a product of recalls stays above 1e-288
  std::size_t group_, heads_;
  std::vector<double> recall_, product_, missed_;  // [set][heads]
  std::vector<double> wanted_;                     // [heads]
  std::uint32_t block_ = 0, queries_ = 0;
};

}  // namespace kvlab
