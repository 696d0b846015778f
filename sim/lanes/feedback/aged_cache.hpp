// The live tokens of one cache as the feedback lane keeps them: by age, and as bits by position.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "policies/aged_set.hpp"

namespace kvlab {

class AgedCache : public AgedSet {
 public:
  /// `tokens`: of the sequence.
  AgedCache(const PolicySpec& spec, std::uint32_t budget, Guards guards, Identity identity,
            std::uint32_t tokens)
      : AgedSet(spec, budget, guards, identity), bits_((tokens + 63) / 64) {}

  /// Bit p: whether position p is live.
  const std::uint64_t* live_bits() const { return bits_.data(); }

  /// Returns the ages of those who left, ascending, as they were before.
  std::span<const std::uint32_t> make_room(std::uint32_t now);
  void admit(std::uint32_t first, std::uint32_t count, const float* brought = nullptr);

 private:
  std::vector<std::uint64_t> bits_;
};

}  // namespace kvlab
