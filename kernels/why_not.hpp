// Says in one line why a call of kvlab.h is refused: what is wrong, where, and what is expected.
// These checks run before each call. Launchers that have no other requirements use them too.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/evict/device_policy.hpp"
#include "kernels/kvlab.h"

namespace kvlab::kernels {

/// Returns the error of a call, and stores its reason for kvlab_last_error().
cudaError_t record_error(const char* call, cudaError_t error, const std::string& why = "");

/// The reason to refuse a caller's struct whose size is not that of this header's struct; empty if
/// the sizes are equal.
std::string why_not_size(std::size_t given, std::size_t wanted);
template <class Args>
std::string why_not_size(const Args& args) {
  return why_not_size(args.struct_size, sizeof(Args));
}

bool is_type(kvlab_type type);

// The next functions return an empty string if the call is valid. They do not read the memory that
// pointers refer to; the launchers check everything else.

/// Checks a cache except for its arrays.
std::string why_not_shape(const kvlab_cache_view& cache, const char* name = "cache");
/// Also checks the requirements of attention, with at most `max_group` query heads per KV head.
std::string why_not_shape(const kvlab_cache_view& cache, const char* name, int max_group);
/// Checks the arguments of kvlab_cache_memory(), for `slots` slots. If the memory is paged, only
/// the page size is checked.
std::string why_not_shape(const kvlab_cache_view& cache, std::int64_t slots);
std::string why_not(const kvlab_write_args& args);
std::string why_not(const kvlab_feature_args& args);
std::string why_not(const DevicePolicy& policy, const kvlab_evicting_attention_args& args);
std::string why_not(const DevicePolicy& policy, const kvlab_evicting_attention_args* layers,
                    int count);
std::string why_not(const kvlab_prefill_args& args);
/// Also checks the requirements of attention over a prompt.
std::string why_not_attended(const kvlab_prefill_args& args);
std::string why_not(const kvlab_observe_args& args);
/// Checks `count` values for a policy's parameters; `counts`: whether `count` is the number of
/// parameters.
std::string why_not_params(const DevicePolicy& policy, int count, bool counts);
/// Names the parameter that is out of range.
std::string why_not_values(const DevicePolicy& policy);
std::string why_not(const DevicePolicy& policy, const kvlab_prefix_args& args);
/// The reason why prompts cannot share a prefix's observations and token features; empty if they
/// can.
std::string why_not_shared(const DevicePolicy& policy);
std::string why_not(const DevicePolicy& policy, const kvlab_compact_args& args);
/// Checks what kvlab_compute_ranks and kvlab_compact_ranked need in addition to kvlab_compact:
/// `by_layer`, `ranks` and the number of devices.
std::string why_not_ranks(const kvlab_compact_args& args, const std::uint64_t* ranks, int devices);

}  // namespace kvlab::kernels
