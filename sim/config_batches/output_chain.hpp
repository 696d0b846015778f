// Sums of values of many live sets at one query, each from the one before: neighbours in the order
// of budgets keep nearly the same tokens, so only what differs is added or taken away.
#pragma once

#include <cstdint>
#include <vector>

#include "sim/config_batches/group_rows.hpp"

namespace kvlab {

class OutputChain {
 public:
  /// The values of a live set, weighted by the exponentials of `query`, whose row `rows` holds:
  /// [heads()][dim], until the next call. `bits`: the set (what is behind the query does not
  /// count); sums [heads()]: of its exponentials. A query's calls come together.
  const float* move_to(std::uint32_t query, const GroupRows& rows, const std::uint64_t* bits,
                       const float* sums);

 private:
  void list(const GroupRows& rows, bool fresh);
  bool is_coarse(const GroupRows& rows, const float* sums) const;

  std::uint32_t query_ = ~std::uint32_t{0};
  std::vector<std::uint64_t> bits_, next_;  // of the last set, and of the one to come
  std::vector<float> gross_, step_;         // [heads()]: magnitudes added since fresh; by the step
  std::vector<std::uint32_t> tokens_;       // that differ
  std::vector<float> weights_;              // [head group][tokens][4], negative for those that left
  std::vector<float> sums_, difference_;    // [heads()][dim]
};

}  // namespace kvlab
