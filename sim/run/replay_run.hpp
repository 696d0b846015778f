// A replay from trace directories to a run directory.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "sim/head_replayer.hpp"
#include "sim/processes/process_group.hpp"
#include "sim/run/run.hpp"

namespace kvlab {

struct ReplayRequest {
  std::vector<std::string> traces;  ///< directories
  std::vector<CacheConfig> sweep;
  ReplayOptions options;
  std::shared_ptr<HeadReplayer> device;  ///< owns the object of options.elsewhere
  bool fresh = false;                    ///< discard the results of an unfinished replay
  /// Receives one line each.
  std::function<void(const std::string&)> notice = [](const std::string&) {};
};

/// Removes configurations whose budget is too small for one of the traces from the sweep, with a
/// notice. Also gives a notice for each budget under which no trace loses a token.
void check_budgets(ReplayRequest& request, std::span<const TraceReader* const> traces);

/// `sweep` with the baselines: `full`, and both oracles at every budget and prefill mode in it.
std::vector<CacheConfig> with_references(std::vector<CacheConfig> sweep);

/// Verifies every trace, then replays them all into `out`. `out` must not exist, and appears only
/// when it is complete. Finished head tasks are stored in `out`.part, and the same replay resumes
/// from them. The bytes of the run do not depend on interruptions, threads or processes. With
/// `options.elsewhere` the head tasks of a trace finish together, and only one process is allowed.
/// Every process of `group` calls it; only the leader writes, calls back and returns the run.
/// Throws std::runtime_error for a trace that does not verify and for what RunFolder refuses, and
/// std::invalid_argument for two traces with one name and for what ReplayJob refuses. Once the work
/// has begun, an error in one of several processes ends them all.
std::optional<Run> replay_to(const ReplayRequest& request, const std::filesystem::path& out,
                             ProcessGroup& group);

/// The same in this process's memory, for traces that are already verified, in the order of
/// request.traces, which are their names in the run. Writes no files.
Run replay_in_memory(const ReplayRequest& request, std::span<const TraceReader* const> traces);

}  // namespace kvlab
