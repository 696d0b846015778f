#include "sim/lanes/feedback/aged_cache.hpp"

namespace kvlab {

std::span<const std::uint32_t> AgedCache::make_room(std::uint32_t now) {
  const auto victims = find_leaving(now);
  for (const std::uint32_t age : victims) {
    const std::uint32_t position = positions()[age];
    bits_[position / 64] &= ~(std::uint64_t{1} << position % 64);
  }
  evict(victims);
  return victims;
}

void AgedCache::admit(std::uint32_t first, std::uint32_t count, const float* brought) {
  AgedSet::admit(first, count, brought);
  for (std::uint32_t position = first; position < first + count; ++position)
    bits_[position / 64] |= std::uint64_t{1} << position % 64;
}

}  // namespace kvlab
