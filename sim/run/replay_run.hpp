// Replays the traces in trace directories and writes the results to a run directory.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "sim/budgets/budget_file.hpp"
#include "sim/head_replayer.hpp"
#include "sim/processes/process_group.hpp"
#include "sim/run/run.hpp"

namespace kvlab {

struct ReplayRequest {
  std::vector<std::string> traces;  ///< directories
  std::vector<CacheConfig> sweep;
  ReplayOptions options;
  std::shared_ptr<HeadReplayer> device;  ///< owns the device to which options.elsewhere points
  bool fresh = false;  ///< whether to delete the results of an unfinished replay first
  /// Called with each message for the user, which is one line.
  std::function<void(const std::string&)> notice = [](const std::string&) {};
};

/// Removes from the sweep the configurations whose budget is too small for one of the traces, with
/// a notice for each. Also gives a notice for each budget at which nothing is evicted on any trace.
void check_budgets(ReplayRequest& request, std::span<const TraceReader* const> traces);

/// Returns `request`, with original positions if there is refetch and `request` names no positions.
/// With refetch, tokens that return keep their positions in the text, even if the policy would use
/// cache positions by default.
SweepRequest sweep_with(SweepRequest request, const std::optional<Selector>& refetch);

/// Adds the reference configurations to `sweep`: `full`, and oracle_attention and oracle_topk at
/// every budget and prefill mode of the sweep. With refetch, adds belady instead of these two
/// oracles.
std::vector<CacheConfig> add_references(std::vector<CacheConfig> sweep, bool refetch = false);

/// Verifies every trace, then replays all traces and writes the run to `out`. The directory `out`
/// must not exist; it appears only when the run is complete. Until then, the directory `out`.part
/// holds the results of finished head tasks. If the replay is interrupted, the same command
/// continues from there. The bytes of the run depend neither on interruptions nor on the numbers of
/// threads and processes. With `options.elsewhere`, all head tasks of a trace finish at the same
/// time, and only one process is allowed. Every process of `group` calls this function. Only the
/// leader writes files, calls the callbacks and returns the run. Throws std::runtime_error if a
/// trace fails verification or if RunFolder throws, and std::invalid_argument if two traces have
/// the same name or if ReplayJob throws. After the first head task has begun, an error in one of
/// several processes ends all of them.
std::optional<Run> replay_to(const ReplayRequest& request, const std::filesystem::path& out,
                             ProcessGroup& group);

/// Replays in memory, without writing files. `traces` must already be verified. They have the order
/// of request.traces, whose elements are the names of the traces in the run.
Run replay_in_memory(const ReplayRequest& request, std::span<const TraceReader* const> traces);

}  // namespace kvlab
