#include "sim/device/walks.hpp"

#include <vector>

#include "traces/base/parallel.hpp"

namespace kvlab {

bool walks_layers(const ModelShape& shape) {
  return shape.kv_heads <= kernels::kMaxLayerHeads && kernels::current_architecture() >= 90;
}

Walks::Key Walks::key_of(const Walk& walk) {
  const kernels::WalkVariant& v = walk.variant;
  return {walk.policy, v.head_groups, v.tokens, v.in_shared, v.type, v.largest};
}

void Walks::load(std::span<const Walk> walks, unsigned threads) {
  std::map<Key, kernels::DeviceProgram> wanted;
  for (const Walk& walk : walks)
    if (!loaded_.contains(key_of(walk)))
      wanted.try_emplace(key_of(walk), kernels::walk_program(*walk.policy, walk.variant,
                                                             kernels::current_architecture()));
  const std::vector<std::pair<Key, kernels::DeviceProgram>> programs(wanted.begin(), wanted.end());
  std::vector<kernels::DeviceCode> codes(programs.size());
  parallel_for(programs.size(), threads, [&](std::size_t i) {
    codes[i] = kernels::code_of(programs[i].second, *std::get<0>(programs[i].first));
  });
  for (std::size_t i = 0; i < programs.size(); ++i) {
    const auto& [key, program] = programs[i];
    loaded_.emplace(key, std::make_unique<Loaded>(codes[i], program.kernels.front()));
  }
}

}  // namespace kvlab
