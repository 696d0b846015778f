// Why a call of kvlab.h is refused, in one line: what is, where, and what would be right. Asked
// before each call, and by launchers that have no more to ask.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/evict/device_policy.hpp"
#include "kernels/kvlab.h"

namespace kvlab::kernels {

/// The error of a call, whose reason is kept for kvlab_last_error.
cudaError_t record_error(const char* call, cudaError_t error, const std::string& why = "");

/// Why a caller's struct is not this header's; empty where it is.
std::string why_not_size(std::size_t given, std::size_t wanted);
template <class Args>
std::string why_not_size(const Args& args) {
  return why_not_size(args.struct_size, sizeof(Args));
}

bool is_type(kvlab_type type);

// Empty: nothing. Pointers are not followed; the launchers know the rest.

/// All of a cache but its arrays.
std::string why_not_shape(const kvlab_cache& cache, const char* name = "cache");
/// And what attention wants of it, with so many query heads for a KV head at most.
std::string why_not_shape(const kvlab_cache& cache, const char* name, int max_group);
/// Of a question for bytes, of so many slots: of its blocks, their size alone.
std::string why_not_shape(const kvlab_cache& cache, std::int64_t slots);
std::string why_not(const kvlab_write_args& args);
std::string why_not(const kvlab_columns_args& args);
std::string why_not(const DevicePolicy& policy, const kvlab_evicting_attention_args& args);
std::string why_not(const DevicePolicy& policy, const kvlab_evicting_attention_args* layers,
                    int count);
std::string why_not(const kvlab_prefill_args& args);
/// And what attention itself wants of a prompt.
std::string why_not_attended(const kvlab_prefill_args& args);
std::string why_not(const kvlab_observe_args& args);
/// Of `count` values for a policy's parameters; `counts`: there are so many.
std::string why_not_params(const DevicePolicy& policy, int count, bool counts);
/// Of a parameter that is out of its range.
std::string why_not_values(const DevicePolicy& policy);
std::string why_not(const DevicePolicy& policy, const kvlab_prefix_args& args);
/// Why prompts cannot share what a prefix's tokens received and bring.
std::string why_not_shared(const DevicePolicy& policy);
std::string why_not(const DevicePolicy& policy, const kvlab_shrink_args& args);
/// Of the halves of a compaction.
std::string why_not_ranks(const kvlab_shrink_args& args, const std::uint64_t* ranks, int devices);

}  // namespace kvlab::kernels
