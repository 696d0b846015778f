// The registered policies that the kernels run.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels/evict/device_policy.hpp"

namespace kvlab::test {

/// All but those that read columns, which the device does not compute yet.
inline std::vector<kernels::DevicePolicy> policies_that_run() {
  std::vector<kernels::DevicePolicy> policies = kernels::device_policies();
  std::erase_if(policies, [](const kernels::DevicePolicy& policy) { return policy.columns > 0; });
  return policies;
}

}  // namespace kvlab::test
