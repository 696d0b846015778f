// A policy on the device: its kernels, and the data that their launchers need.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "policies/policy.hpp"
#include "policies/rank.hpp"

namespace kvlab::kernels {

/// One policy: from the registry, or compiled at run time (kernels/runtime).
struct DevicePolicy {
  std::string_view name;
  Needs needs;
  bool evicts;         ///< if not, steps need a slot for every token, so no pair may have a budget
  bool oldest_first;   ///< supports cache positions with rotated keys
  bool weighted;       ///< whether observe_queries() must be given the policy's weights and tail
  RankType rank_type;  ///< type in which a compaction adds and averages ranks
  std::span<const char* const>
      features;              ///< names of the features that it reads: kvlab_policy_state::features
  std::size_t slot_bytes;    ///< bytes of a state, kvlab_policy_state::states; 0: none
  std::size_t params_bytes;  ///< bytes of kvlab_policy_state::params of one sequence; 0: none
  /// Writes a sequence's parameters, params_bytes, from one value for each parameter, in the order
  /// of the catalogue (docs/reference/policies.md). Returns false if a value is out of range.
  bool (*params)(std::span<const double> values, std::byte* to);
  /// Names of the parameters in that order; null after the last.
  const char* (*param_name)(std::size_t index);
  double (*param_default)(std::size_t index);  ///< their defaults; NaN after the last
  /// As in PolicyOps. `weight` gives a query's weight by the number of younger queries. `tail` is
  /// the age from which on queries have weight 0.
  float (*weight)(std::uint32_t age, const void* params);
  std::uint32_t (*tail)(const void* params);
  /// For run-time compilation: the path of the header below policies/, and the name of the struct
  /// in it.
  std::string_view header, type;

  // Kernels: a function's address, or a cudaKernel_t of loaded code.
  const void* observe_pairs;  ///< observing_attention.cuh
  const void* evict;          ///< plain_eviction.cuh
  const void* settle_tokens;  ///< compact.cuh
  const void* run_states;     ///< policy_probe.cuh
};

/// Every registered policy without hooks that only the CPU calls (policies/order_hooks.hpp), in the
/// registry's order.
const std::vector<DevicePolicy>& device_policies();

}  // namespace kvlab::kernels
