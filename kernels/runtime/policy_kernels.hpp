// The kernels of a policy that are compiled while the program runs.
#pragma once

#include "kernels/evict/device_policy.hpp"
#include "kernels/replay/replay.hpp"
#include "kernels/runtime/device_program.hpp"
#include "policies/entry.hpp"

namespace kvlab::kernels {

/// Whether the policy has a text that can be compiled: the registry's have, and those from a
/// source.
bool has_text(const PolicyEntry& entry);

/// The four kernels of a DevicePolicy.
DeviceProgram eviction_program(const PolicyEntry& entry, int architecture);
/// One walk of the replay.
DeviceProgram walk_program(const PolicyEntry& entry, const WalkVariant& variant, int architecture);

/// The program's code, from the user's cache where it has it. Throws as compile() does, naming the
/// entry's source.
DeviceCode code_of(const DeviceProgram& program, const PolicyEntry& entry);

/// A policy from a source as those of the registry are, for the current device.
class PolicyKernels {
 public:
  explicit PolicyKernels(std::shared_ptr<const PolicyEntry> entry);
  const DevicePolicy& policy() const { return policy_; }

 private:
  std::shared_ptr<const PolicyEntry> entry_;
  LoadedCode code_;
  DevicePolicy policy_;
};

}  // namespace kvlab::kernels
