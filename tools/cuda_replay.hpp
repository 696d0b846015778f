// The replay on a CUDA device.
#pragma once

#include <functional>
#include <memory>

#include "sim/head_replayer.hpp"

namespace kvlab {

/// Called with the indices of a unit and a configuration of the plan, a query, and the live
/// positions that it attended, ascending.
using KeptWatcher = std::function<void(std::size_t unit, std::size_t config, std::uint32_t query,
                                       std::span<const std::uint32_t> live)>;

/// What takes registered policies at any positions, for groups of at most 8 query heads of a size
/// up to 256 that is a multiple of 8. Throws std::invalid_argument in a build without CUDA,
/// std::runtime_error without a device. With a
/// watcher it is slow.
std::unique_ptr<HeadReplayer> cuda_replayer(KeptWatcher watcher = nullptr);

}  // namespace kvlab
