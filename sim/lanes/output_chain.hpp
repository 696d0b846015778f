// Attention outputs of many live sets at one query, each from the one before: neighbours in the
// order of budgets keep nearly the same tokens, so only what differs is added or taken away.
#pragma once

#include <cstdint>
#include <vector>

#include "sim/lanes/group_rows.hpp"

namespace kvlab {

class OutputChain {
 public:
  /// Begins at a query with the empty set. `rows` holds the query's row.
  void begin(std::uint32_t query, const GroupRows& rows);
  /// Moves to the live set of `bits` (up to the query's position), whose exponentials sum to
  /// sums [heads()], and returns their sum weighted by values, [heads()][dim], not divided.
  const float* move_to(const std::uint64_t* bits, const float* sums);

 private:
  void list(const std::uint64_t* bits, bool from_nothing);
  bool is_coarse(const float* sums);
  void apply();

  const GroupRows* rows_ = nullptr;
  std::uint32_t query_ = 0;
  std::size_t words_ = 0;
  std::vector<std::uint64_t> bits_;  // of the set that sum_ is for
  std::vector<float> sum_, gross_,
      step_;                           // [heads()][dim]; [heads()]: magnitudes added since fresh
  std::vector<std::uint32_t> tokens_;  // of the step
  std::vector<float> weights_;         // [quad][step][4], negative for those that left
};

}  // namespace kvlab
