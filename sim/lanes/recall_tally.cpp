#include "sim/lanes/recall_tally.hpp"

#include <cmath>

namespace kvlab {

void RecallTally::flush(HeadStats& stats) {
  if (queries_ == 0) return;
  for (std::size_t h = 0; h < heads_.size(); ++h) {
    HeadStats::PerQueryHead& head = stats.heads[h];
    head.recall.add(block_, heads_[h].recall, queries_);
    head.nll.add(block_, -std::log(heads_[h].product), queries_);
    head.miss.add(block_, heads_[h].missed, heads_[h].wanted);
    heads_[h] = {};
  }
  queries_ = 0;
}

}  // namespace kvlab
