// The kernels of a policy that are compiled while the program runs.
#pragma once

#include <array>

#include "kernels/evict/device_policy.hpp"
#include "kernels/evict/policy_description.hpp"
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

/// The code of a policy's header for HeaderPolicy. Throws as code_of(), and std::invalid_argument
/// if it holds no policy.
DeviceCode code_of_header(const std::string& path, const std::string& text, int architecture);

/// A policy from a header that no compiler of the host's has read: the code itself says what the
/// host has to know. Hooks of policy() that the host would call, and kernels that kvlab.h does not
/// launch, are null.
class HeaderPolicy {
 public:
  /// `code`: of code_of_header(), for the current device. Throws as LoadedCode does.
  explicit HeaderPolicy(const DeviceCode& code);
  HeaderPolicy(const HeaderPolicy&) = delete;
  HeaderPolicy& operator=(const HeaderPolicy&) = delete;

  const DevicePolicy& policy() const { return policy_; }
  bool write_params(std::span<const double> values, std::byte* to) const;
  /// Waits for the device.
  cudaError_t weigh(const void* params, std::uint32_t queries, float* to,
                    std::uint32_t* tail) const;

 private:
  LoadedCode code_;
  const void* weigh_;  ///< a kernel
  PolicyDescription about_;
  std::array<const char*, kMaxFeatures> features_;
  DevicePolicy policy_;
};

}  // namespace kvlab::kernels
