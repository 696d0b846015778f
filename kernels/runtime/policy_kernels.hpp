// The kernels of a policy that was compiled from a header while the program runs.
#pragma once

#include "kernels/evict/admission.hpp"
#include "kernels/evict/eviction_kernels.hpp"
#include "kernels/evict/policy_probe.hpp"
#include "kernels/runtime/device_program.hpp"
#include "policies/entry.hpp"

namespace kvlab::kernels {

/// Compiles the device code of `entry`, which has a source, for sm_`architecture`. Needs no device.
/// Throws as compile_device_code does, naming the source.
DeviceCode compile_policy_code(const PolicyEntry& entry, int architecture);

/// The same kernels as those of a policy that is in the registry, for the current device.
class PolicyKernels {
 public:
  explicit PolicyKernels(std::shared_ptr<const PolicyEntry> entry);

  EvictionKernels observing() const;
  EvictionKernels plain() const;
  AdmissionPolicy admission() const;
  DeviceProbe probe() const;

 private:
  EvictionKernels described(const char* name) const;
  const void* kernel(const char* name) const;

  std::shared_ptr<const PolicyEntry> entry_;
  LoadedCode code_;
};

}  // namespace kvlab::kernels
