// Sums the values of many live sets at one query. Each sum starts from the previous one: neighbours
// in the order of budgets keep nearly the same tokens, so only the differences are added or
// removed.
#pragma once

#include <cstdint>
#include <vector>

#include "sim/config_batches/group_rows.hpp"

namespace kvlab {

class OutputChain {
 public:
  /// Returns the sum of a live set's values, weighted by the exponentials of `query`, whose row
  /// `rows` holds: [heads()][dim], valid until the next call. `bits`: the set; tokens after the
  /// query are ignored. `sums` [heads()]: sums of the set's exponentials. All calls for one query
  /// must be consecutive.
  const float* move_to(std::uint32_t query, const GroupRows& rows, const std::uint64_t* bits,
                       const float* sums);

 private:
  void list(const GroupRows& rows, bool fresh);
  bool is_coarse(const GroupRows& rows, const float* sums) const;

  std::uint32_t query_ = ~std::uint32_t{0};
  std::vector<std::uint64_t> bits_, next_;  // of the previous set; of the next one
  std::vector<float> gross_, step_;         // [heads()]: magnitudes added since restart; by step
  std::vector<std::uint32_t> tokens_;       // tokens in only one of the two sets
  std::vector<float> weights_;              // [head group][tokens][4], negative for removed tokens
  std::vector<float> sums_, difference_;    // [heads()][dim]
};

}  // namespace kvlab
