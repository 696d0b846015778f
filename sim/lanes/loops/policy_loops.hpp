// A policy's hooks over contiguous states: the policy's own text, inlined into loops that are
// compiled once for each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "policies/policy.hpp"

namespace kvlab {

struct PolicyEntry;  // policies/catalogue.hpp

/// What some tokens, by age, received in one admission.
struct Seen {
  const std::uint64_t* mass = nullptr;          ///< where the policy needs mass
  const std::uint32_t* requests = nullptr;      ///< where it needs requests
  const std::uint32_t* last_request = nullptr;  ///< null: `query` for all
  std::uint32_t query = 0;                      ///< the admission's last
  std::uint32_t queries = 1;  ///< of the admission; the last `queries` tokens are its own
};

/// The hooks of one policy. `slots` points to its states, `params` to its parameters.
struct PolicyLoops {
  std::size_t slot_bytes, params_bytes;  ///< of one, padding of an empty struct included
  void (*read_params)(const double* values, void* params);
  void (*admit)(void* slots, const std::uint32_t* positions, std::size_t count, const void* params,
                const Step& step);
  void (*observe)(void* slots, const Seen& seen, std::size_t count, const void* params,
                  const Step& step);
  void (*rank)(const void* slots, const std::uint32_t* positions, std::size_t count,
               const void* params, const Step& step, std::uint64_t* ranks);
  /// The first of the lowest ranks in [begin, end), begin < end.
  std::size_t (*first_least)(const void* slots, const std::uint32_t* positions, std::size_t begin,
                             std::size_t end, const void* params, const Step& step);
  float (*weight)(std::uint32_t age, const void* params);
  std::uint32_t (*tail)(const void* params);
};

/// Those of a registered policy, for the best instruction set that this machine has; null for a
/// policy that was compiled at run time, whose text no set of loops holds.
const PolicyLoops* policy_loops(const PolicyEntry& entry);
/// By the policy's place in the registry.
const PolicyLoops* policy_loops_base();
const PolicyLoops* policy_loops_avx2();
const PolicyLoops* policy_loops_avx512();

}  // namespace kvlab
