// What a handle of kvlab.h's policies is.
#pragma once

#include <memory>

#include "kernels/evict/eviction_kernels.hpp"
#include "kernels/kvlab.h"
#include "kernels/runtime/policy_kernels.hpp"

struct kvlab_policy {
  kvlab::kernels::EvictionKernels kernels;
  std::unique_ptr<const kvlab::kernels::HeaderPolicy> header = nullptr;  ///< null: of the registry
};
