#include "sim/config_batches/future_masses.hpp"

#include <algorithm>

#include "traces/base/cancel.hpp"

namespace kvlab {

FutureMasses::FutureMasses(GroupRows& rows) : masses_(whole_blocks(rows.view().tokens)) {
  const std::uint32_t tokens = rows.view().tokens;
  for (std::uint32_t first = 0; first < tokens; first += rows.block_queries()) {
    const std::uint32_t count = std::min(rows.block_queries(), tokens - first);
    throw_if_cancelled();
    rows.compute(first, count);
    for (std::uint32_t query = first; query < first + count; ++query)
      rows.add_masses(query, masses_.data());
  }
}

void FutureMasses::rank(const std::uint32_t* positions, std::size_t count, const Step&,
                        std::uint64_t* ranks) {
  for (std::size_t i = 0; i < count; ++i) ranks[i] = masses_[positions[i]];
}

void FutureMasses::spend(std::uint32_t query, GroupRows& rows) {
  const std::uint64_t* const given = rows.masses(query);
  for (std::uint32_t token = 0; token <= query; ++token) masses_[token] -= given[token];
}

}  // namespace kvlab
