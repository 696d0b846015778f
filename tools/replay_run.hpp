// A replay from trace directories to a run directory.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "sim/run.hpp"

namespace kvlab {

struct ReplayRequest {
  std::vector<std::string> traces;  ///< directories
  std::vector<ReplayConfig> grid;
  ReplayOptions options;
};

/// `grid` and the references beside it: `full`, and both oracles at every budget and prefill in it.
std::vector<ReplayConfig> with_references(std::vector<ReplayConfig> grid);

/// Verifies every trace, then replays them all. Throws std::runtime_error for a trace that does not
/// verify, std::invalid_argument for two traces of one name and for what replay() refuses.
Run replay_traces(const ReplayRequest& request);

/// The same into `out`, which must not exist, and appears only when it is whole.
Run replay_to(const ReplayRequest& request, const std::filesystem::path& out);

}  // namespace kvlab
