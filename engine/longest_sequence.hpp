// How many tokens a sequence may have before something that counts them is full.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

namespace kvlab {

/// In tokens. Each step gives a token at most `group` probabilities of 1 (2^32 units of a 64-bit
/// sum) and `group` requests (of a 32-bit count); positions have 31 bits.
constexpr std::uint32_t longest_sequence(std::uint32_t group) {
  return std::min((1u << 31) - 1, std::numeric_limits<std::uint32_t>::max() / group);
}

}  // namespace kvlab
