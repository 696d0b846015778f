// `oracle_attention` in configuration batches. The ranks equal those of AttentionOracle, but are
// computed from the rows that all configurations share.
#pragma once

#include <cstdint>
#include <vector>

#include "sim/config_batches/group_rows.hpp"
#include "sim/oracles/oracle.hpp"

namespace kvlab {

/// Ranks a token by the probability mass that future queries of the full cache give it. The masses
/// are the same for all budgets.
class FutureMasses final : public Oracle {
 public:
  /// Computes the row of every query once.
  explicit FutureMasses(GroupRows& rows);

  void rank(const std::uint32_t* positions, std::size_t count, const Step& step,
            std::uint64_t* ranks) override;
  /// Subtracts the masses that `query` gives, because this query is no longer in the future. Call
  /// it for each query in order, after the query has gone through all configurations.
  void spend(std::uint32_t query, GroupRows& rows);

 private:
  std::vector<std::uint64_t> masses_;  // Q32.32 [token], padded to a whole block
};

}  // namespace kvlab
