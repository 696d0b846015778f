// Where a command runs that may evict.
#pragma once

#include "tools/options.hpp"

namespace kvlab {

/// `--device`; without it the CPU where the cache `evicts`: the CUDA decoder's evicting caches are
/// experimental (docs/cuda.md), so they have to be asked for. Throws as device_from().
inline Device evicting_device_from(const po::variables_map& options, bool evicts) {
  return evicts && !options.count("device") ? Device::cpu : device_from(options);
}

}  // namespace kvlab
