// `belady`: evicts the token whose next selection is farthest in the future. No other order of
// evictions fetches fewer tokens.
#pragma once

#include <cstdint>
#include <vector>

#include "sim/oracles/oracle.hpp"
#include "sim/refetch/selection.hpp"

namespace kvlab {

/// Several caches may share one BeladyOracle, because rank() changes no state.
class BeladyOracle final : public Oracle {
 public:
  explicit BeladyOracle(const Selection& selection);

  void rank(const std::uint32_t* positions, std::size_t count, const Step& step,
            std::uint64_t* ranks) override;

 private:
  std::vector<std::vector<std::uint32_t>> uses_;  // [token]: queries that select it, ascending
};

}  // namespace kvlab
