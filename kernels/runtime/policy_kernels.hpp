// The kernels of a policy that are compiled at run time.
#pragma once

#include <array>

#include "kernels/evict/device_policy.hpp"
#include "kernels/evict/policy_description.hpp"
#include "kernels/replay/replay.hpp"
#include "kernels/runtime/device_program.hpp"
#include "policies/entry.hpp"

namespace kvlab::kernels {

/// Whether the policy has source text to compile. This is so for policies of the registry and for
/// policies from a source file.
bool has_text(const PolicyEntry& entry);

/// The program with the four kernels of a DevicePolicy.
DeviceProgram eviction_program(const PolicyEntry& entry, int architecture);
/// The program with one variant of the replay's walk.
DeviceProgram walk_program(const PolicyEntry& entry, const WalkVariant& variant, int architecture);

/// Returns the program's code, from the user's cache if it is there. Throws the exceptions of
/// compile(); their message contains the name of the entry's source.
DeviceCode code_of(const DeviceProgram& program, const PolicyEntry& entry);

/// The kernels of a policy from a source file, compiled for the current device. They correspond to
/// the kernels of a registered policy.
class PolicyKernels {
 public:
  explicit PolicyKernels(std::shared_ptr<const PolicyEntry> entry);
  const DevicePolicy& policy() const { return policy_; }

 private:
  std::shared_ptr<const PolicyEntry> entry_;
  LoadedCode code_;
  DevicePolicy policy_;
};

/// Returns the code of a policy's header for HeaderPolicy. Throws the exceptions of code_of(), and
/// std::invalid_argument if the header has no policy.
DeviceCode code_of_header(const std::string& path, const std::string& text, int architecture);

/// A policy from a header that only the device compiler has read. The compiled code contains a
/// description of the policy, which the host reads. policy() has null pointers for the policy's
/// host functions and for kernels that kvlab.h does not launch.
class HeaderPolicy {
 public:
  /// `code`: from code_of_header(), for the current device. Throws the exceptions of LoadedCode.
  explicit HeaderPolicy(const DeviceCode& code);
  HeaderPolicy(const HeaderPolicy&) = delete;
  HeaderPolicy& operator=(const HeaderPolicy&) = delete;

  const DevicePolicy& policy() const { return policy_; }
  bool write_params(std::span<const double> values, std::byte* to) const;
  /// Computes the weights of queries and the tail. Synchronizes.
  cudaError_t weigh(const void* params, std::uint32_t queries, float* to,
                    std::uint32_t* tail) const;

 private:
  LoadedCode code_;
  const void* weigh_;  ///< a kernel: see weigh_queries.cuh
  PolicyDescription about_;
  std::array<const char*, kMaxFeatures> features_;
  DevicePolicy policy_;
};

}  // namespace kvlab::kernels
