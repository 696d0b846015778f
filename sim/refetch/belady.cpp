#include "sim/refetch/belady.hpp"

#include <algorithm>

namespace kvlab {

BeladyOracle::BeladyOracle(const Selection& selection) : uses_(selection.tokens()) {
  for (std::uint32_t query = 0; query < selection.tokens(); ++query)
    for (const std::uint32_t position : selection.positions(query))
      uses_[position].push_back(query);
}

void BeladyOracle::rank(const std::uint32_t* positions, std::size_t count, const Step& step,
                        std::uint64_t* ranks) {
  for (std::size_t i = 0; i < count; ++i) {
    const std::vector<std::uint32_t>& uses = uses_[positions[i]];
    const auto next = std::ranges::lower_bound(uses, step.now);
    ranks[i] = next == uses.end() ? 0 : ~0u - *next;
  }
}

}  // namespace kvlab
