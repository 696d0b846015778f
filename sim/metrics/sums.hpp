// The sums from which metrics are computed, with the same layout on the host and on the device.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvlab {

/// Maximum number of blocks of measured queries.
inline constexpr std::uint32_t kMaxQueryBlocks = 16;

enum class Sum : std::size_t {
#define SUM(name) name,
#include "sim/metrics/metrics.def"
  kept_of_named,  ///< kept mass of the first passage; after it come the total mass of that passage,
                  ///< then both masses of the next passage, and so on
};
constexpr Sum kept_of(std::size_t named) {
  return static_cast<Sum>(static_cast<std::size_t>(Sum::kept_of_named) + 2 * named);
}
constexpr Sum all_of(std::size_t named) {
  return static_cast<Sum>(static_cast<std::size_t>(kept_of(named)) + 1);
}

/// Layout: [Sum][query head, padded to whole head groups][block].
struct SumsShape {
  std::size_t head_groups, named;

  constexpr std::size_t size() const { return at(kept_of(named), 0, 0); }
  constexpr std::size_t at(Sum sum, std::size_t head, std::size_t block) const {
    return (static_cast<std::size_t>(sum) * 4 * head_groups + head) * kMaxQueryBlocks + block;
  }
};

}  // namespace kvlab
