// The walks of a replay's policies (kernels/replay/walk.cuh), compiled as they are first wanted.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <tuple>

#include "kernels/runtime/policy_kernels.hpp"
#include "traces/trace.hpp"

namespace kvlab {

/// One policy's walk.
struct Walk {
  std::shared_ptr<const PolicyEntry> policy;
  kernels::WalkVariant variant;
};

/// Whether the KV heads of a layer can be walked together: clusters of blocks (sm_90), of at most
/// kernels::kMaxLayerHeads.
bool walks_layers(const ModelShape& shape);

/// Walks on the current device.
class Walks {
 public:
  /// Compiles those that are not here and not in the user's cache, on so many threads. Throws as
  /// kernels::code_of() does.
  void load(std::span<const Walk> walks, unsigned threads);
  /// For replay_walk(); `walk` is loaded.
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
