#include "sim/lanes/recall_tally.hpp"

#include <algorithm>
#include <cmath>

namespace kvlab {

void RecallTally::begin_query(std::uint32_t block, const std::uint32_t* wanted,
                              std::span<HeadStats> stats) {
  if (block != block_ || queries_ == kMostQueries) flush(stats);
  block_ = block;
  ++queries_;
  for (std::size_t h = 0; h < group_; ++h) wanted_[h] += wanted[h];
}

void RecallTally::add(std::size_t set, std::uint32_t head, double recall, double missed) {
  const std::size_t at = set * heads_ + head;
  recall_[at] += recall;
  product_[at] *= std::max(recall, kRecallFloor);
  missed_[at] += missed;
}

void RecallTally::add_all(const double* sums, const std::uint32_t* hits, const float* full,
                          const std::uint32_t* wanted, const std::uint32_t* own,
                          std::size_t whole) {
  double inverse[kQuad];
  std::int32_t due[kQuad];
  for (std::size_t quad = 0; quad < heads_; quad += kQuad) {
    for (std::size_t h = 0; h < kQuad; ++h) {
      inverse[h] = full[quad + h] > 0 ? 1 / static_cast<double>(full[quad + h]) : 0;
      due[h] = static_cast<std::int32_t>(wanted[quad + h] + own[quad + h]);
    }
    row_loops().tally(sums + quad, hits + quad, recall_.size() / heads_, whole, heads_, inverse,
                      due, kRecallFloor, recall_.data() + quad, product_.data() + quad,
                      missed_.data() + quad);
  }
}

void RecallTally::flush(std::span<HeadStats> stats) {
  if (queries_ == 0) return;
  for (std::size_t set = 0; set < stats.size(); ++set)
    for (std::size_t h = 0; h < group_; ++h) {
      HeadStats::PerQueryHead& head = stats[set].heads[h];
      const std::size_t at = set * heads_ + h;
      head.recall.add(block_, recall_[at], queries_);
      head.nll.add(block_, -std::log(product_[at]), queries_);
      head.miss.add(block_, missed_[at], wanted_[h]);
    }
  std::fill(recall_.begin(), recall_.end(), 0.0);
  std::fill(product_.begin(), product_.end(), 1.0);
  std::fill(missed_.begin(), missed_.end(), 0.0);
  std::fill(wanted_.begin(), wanted_.end(), 0.0);
  queries_ = 0;
}

}  // namespace kvlab
