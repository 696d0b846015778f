// Arguments of a policy probe. Tests run the same probe on the host and on the device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "policies/policy.hpp"
#include "policies/rule/eviction_order.hpp"

namespace kvlab {

inline constexpr unsigned kProbeThreads = 128;

/// A probe runs a policy's hooks on a fixed set of tokens over some steps. All pointers are device
/// memory.
struct ProbeArgs {
  std::uint32_t tokens;     ///< token i is at position i, in slot i; all are appended in step 0
  std::uint32_t steps;      ///< each step observes, then ranks
  const Step* step;         ///< [step]
  const Observation* seen;  ///< [step, token]
  const float* features;    ///< [token, feature]
  ProtectedTokens protected_tokens;  ///< in tokens
  std::uint64_t* ranks;              ///< out, [step, token]
  std::uint32_t* eviction_order;  ///< out, [step, token]: number of tokens evicted before this one
  std::byte* slots;               ///< out, [token, slot_bytes]: the states after the last step
  /// out, [token]: the weight of a query whose age is the token's index; 1 if the policy does not
  /// weigh queries
  float* weights;
};

}  // namespace kvlab
