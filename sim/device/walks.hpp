// The walks of a replay's policies. A walk is the kernel that takes the caches of one policy
// through a block of queries (kernels/replay/walk.cuh). It is compiled on first use.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <tuple>

#include "kernels/runtime/policy_kernels.hpp"
#include "traces/trace.hpp"

namespace kvlab {

/// Identifies a walk: a policy, and the variant of the kernel.
struct Walk {
  std::shared_ptr<const PolicyEntry> policy;
  kernels::WalkVariant variant;
};

/// Whether one walk can run all KV heads of a layer together, as scope=layer requires. This needs
/// clusters of thread blocks (sm_90) and at most kernels::kMaxLayerHeads KV heads.
bool walks_layers(const ModelShape& shape);

/// The walks on the current device.
class Walks {
 public:
  /// Loads the walks. Those that are neither loaded nor in the user's cache of compiled code are
  /// compiled, on `threads` threads. Throws as kernels::code_of() does.
  void load(std::span<const Walk> walks, unsigned threads);
  /// The kernel for replay_walk(); `walk` must be loaded.
  const void* kernel(const Walk& walk) const { return loaded_.at(key_of(walk))->kernel; }

 private:
  using Key = std::tuple<std::shared_ptr<const PolicyEntry>, int, kernels::ReplayTokens, bool,
                         kernels::Type, bool>;
  struct Loaded {
    Loaded(const kernels::DeviceCode& from, const std::string& name)
        : code(from), kernel(code.kernel(name)) {}
    kernels::LoadedCode code;
    const void* kernel;
  };
  static Key key_of(const Walk& walk);

  std::map<Key, std::unique_ptr<Loaded>> loaded_;
};

}  // namespace kvlab
