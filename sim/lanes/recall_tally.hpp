// Recall and misses of one configuration on one KV head, summed over some queries before they enter
// its figures: one logarithm for all of them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "sim/metrics.hpp"

namespace kvlab {

class RecallTally {
 public:
  explicit RecallTally(std::uint32_t group) : heads_(group) {}

  /// Before a query's figures; `block` is the one of the span that it lies in.
  void begin_query(std::uint32_t block, HeadStats& stats) {
    if (block != block_ || queries_ == kMostQueries) flush(stats);
    block_ = block;
    ++queries_;
  }
  void add(std::uint32_t head, double recall, double missed, double wanted) {
    Sums& sums = heads_[head];
    sums.recall += recall;
    sums.product *= std::max(recall, kRecallFloor);
    sums.missed += missed;
    sums.wanted += wanted;
  }
  /// Hands what there is to `stats`.
  void flush(HeadStats& stats);

 private:
  static constexpr std::uint32_t kMostQueries = 16;  // a product of recalls stays above 1e-144
  struct Sums {
    double recall = 0, product = 1, missed = 0, wanted = 0;
  };
  std::vector<Sums> heads_;
  std::uint32_t block_ = 0, queries_ = 0;
};

}  // namespace kvlab
