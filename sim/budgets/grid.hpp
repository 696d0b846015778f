// The grid of a replay, as people write it: policies x budgets x prefill and position modes.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "policies/cache_config.hpp"

namespace kvlab {

/// The lists that are multiplied, each entry as on the command line.
struct GridRequest {
  std::vector<std::string> policies, budgets;
  std::vector<std::string> prefills{"dense"};
  std::vector<std::string> positions;  ///< empty: each policy's own
  std::uint64_t seed = 0;
  double threshold = 0.01;
};

/// Every policy x budget x prefill x positions, each once. `full` is one row with budget `all`, and
/// a reference comes with original positions only. Throws std::invalid_argument: an unknown name, a
/// policy that evicts without a budget, guards that do not fit a budget in tokens; and as
/// read_budget().
std::vector<CacheConfig> make_grid(const GridRequest& request,
                                   std::span<const std::string_view> references,
                                   const CompiledPolicies& compiled);

}  // namespace kvlab
