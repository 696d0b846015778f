// Sums the values of many live sets at one query. Each sum is computed from the previous one:
// consecutive configurations keep nearly the same tokens, so only the tokens in which their sets
// differ are added or subtracted.
#pragma once

#include <cstdint>
#include <vector>

#include "sim/config_batches/group_rows.hpp"

namespace kvlab {

class OutputChain {
 public:
  /// Returns the sums of a live set's values, weighted by the exponentials of `query`, for each
  /// head: [heads()][dim], valid until the next call. `rows` must hold the row of `query`. `bits`:
  /// one bit for each position, set if the token is live; tokens after the query are ignored.
  /// `sums` [heads()]: the sums of the set's exponentials. All calls for one query must be
  /// consecutive.
  const float* move_to(std::uint32_t query, const GroupRows& rows, const std::uint64_t* bits,
                       const float* sums);

 private:
  void list(const GroupRows& rows, bool fresh);
  bool is_coarse(const GroupRows& rows, const float* sums) const;

  std::uint32_t query_ = ~std::uint32_t{0};
  std::vector<std::uint64_t> bits_, next_;  // live bits of the previous set and of the next one
  std::vector<float> gross_, step_;    // [heads()]: magnitudes since the restart, and of this step
  std::vector<std::uint32_t> tokens_;  // tokens that are in only one of the two sets
  std::vector<float> weights_;         // [head group][tokens][4], negative for removed tokens
  std::vector<float> sums_, difference_;  // [heads()][dim]
};

}  // namespace kvlab
