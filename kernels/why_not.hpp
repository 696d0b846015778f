// Why a call of kvlab.h is refused, in one line: what is, where, and what would be right. Asked
// before each call, which then converts arguments that it can trust.
#pragma once

#include <string>

#include "kernels/evict/device_policy.hpp"
#include "kernels/kvlab.h"

namespace kvlab::kernels {

bool is_type(kvlab_type type);

// Empty: nothing. Pointers are not followed; the launchers know the rest.

/// All of a cache but its arrays.
std::string why_not_shape(const kvlab_cache& cache, const char* name = "cache");
std::string why_not(const kvlab_write_args& args);
std::string why_not(const kvlab_columns_args& args);
std::string why_not(const DevicePolicy& policy, const kvlab_evicting_attention_args& args);
std::string why_not(const DevicePolicy& policy, const kvlab_evicting_attention_args* layers,
                    int count);
std::string why_not(const kvlab_prefill_args& args);
std::string why_not(const kvlab_observe_args& args);
std::string why_not(const DevicePolicy& policy, const kvlab_shrink_args& args);

}  // namespace kvlab::kernels
