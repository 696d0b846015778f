// How many tokens LRU fetches with every size of the device buffer, from one reading of the
// selections.
//
// LRU has the inclusion property: a larger buffer holds every token that a smaller one holds. So
// the tokens are kept in one list, the most recently used first, and a selected token is fetched
// with each buffer that is not larger than the number of tokens before it in the list (its stack
// distance, Mattson et al. 1970).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sim/refetch/selection.hpp"

namespace kvlab {

/// [budget]: the number of tokens that the policy `lru`, without protected tokens, fetches with
/// this budget. It is valid from the number of selected tokens of a query + 1 on; [0] is the number
/// of all selected tokens. `used`: the tokens before query used.size(), the least recently used
/// first; all of them are resident at that query. From it on, every query selects.
std::vector<std::uint64_t> lru_fetches(const Selection& selection,
                                       std::span<const std::uint32_t> used);

}  // namespace kvlab
