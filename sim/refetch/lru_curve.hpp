// Computes from one reading of the selections how many tokens LRU fetches with every size of the
// device buffer.
//
// LRU has the inclusion property: a larger buffer holds every token that a smaller buffer holds. So
// one list of tokens, the most recently used first, describes the buffers of all sizes. A selected
// token is fetched with each buffer whose size is at most the number of tokens before it in the
// list (its stack distance, Mattson et al. 1970).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sim/refetch/selection.hpp"

namespace kvlab {

/// Element [budget] is the number of tokens that the policy `lru`, without protected tokens,
/// fetches with this budget. An element is valid if the budget can hold all tokens that a query
/// selects and the query's own token. Element [0] is the number of all selected tokens. `used`: the
/// tokens before query used.size(), the least recently used first; all of them are resident at that
/// query. That query and every later query select tokens.
std::vector<std::uint64_t> lru_fetches(const Selection& selection,
                                       std::span<const std::uint32_t> used);

}  // namespace kvlab
