// A policy on the device: its kernels, and what their launchers need to know of it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "policies/policy.hpp"
#include "policies/rank.hpp"

namespace kvlab::kernels {

/// One policy. Of the registry, or compiled while the program runs (kernels/runtime).
struct DevicePolicy {
  std::string_view name;
  Needs needs;
  bool oldest_first;   ///< may be at cache positions with rotated keys
  bool weighted;       ///< observe_queries takes its weights and tail
  RankType rank_type;  ///< what a compaction adds and averages
  std::span<const char* const>
      features;              ///< names of those that it reads: kvlab_policy_state::features
  std::size_t slot_bytes;    ///< of a state, kvlab_policy_state::states; 0: none
  std::size_t params_bytes;  ///< of kvlab_policy_state::params, one sequence; 0: none
  /// Writes params_bytes: one value for each parameter, as in the catalogue. False: one is out of
  /// its range.
  bool (*params)(std::span<const double> values, std::byte* to);
  /// Their names, in that order; null behind the last.
  const char* (*param_name)(std::size_t index);
  /// As of PolicyOps: of a query by the number of younger ones; from which age on it weighs
  /// nothing.
  float (*weight)(std::uint32_t age, const void* params);
  std::uint32_t (*tail)(const void* params);
  /// Its text, for what is compiled when it is wanted: below policies/, and the struct there.
  std::string_view header, type;

  // Kernels: a function's address, or a cudaKernel_t of code that was loaded.
  const void* observe_pairs;  ///< observing_attention.cuh
  const void* evict;          ///< plain_eviction.cuh
  const void* settle_tokens;  ///< compact.cuh
  const void* run_states;     ///< policy_probe.cuh
};

/// Every registered policy, in the registry's order.
const std::vector<DevicePolicy>& device_policies();

}  // namespace kvlab::kernels
