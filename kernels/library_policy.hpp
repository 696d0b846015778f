// The type behind a policy handle of kvlab.h.
#pragma once

#include <memory>

#include "kernels/evict/eviction_kernels.hpp"
#include "kernels/kvlab.h"
#include "kernels/runtime/policy_kernels.hpp"

struct kvlab_policy {
  kvlab::kernels::EvictionKernels kernels;
  /// null if the policy is in the registry
  std::unique_ptr<const kvlab::kernels::HeaderPolicy> header = nullptr;
};
