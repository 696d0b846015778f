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
  std::shared_ptr<HeadReplayer> device;  ///< what options.elsewhere points to
  bool fresh = false;                    ///< throw away what an unfinished replay left
  std::function<void(const std::string&)> notice = [](const std::string&) {};  ///< one line each
};

/// Leaves out of the sweep, with a notice, what has too small a budget for one of the traces; gives
/// a notice of each budget under which no trace loses a token.
void check_budgets(ReplayRequest& request, std::span<const TraceReader* const> traces);

/// `sweep` and the references beside it: `full`, and both oracles at every budget and prefill in
/// it.
std::vector<CacheConfig> with_references(std::vector<CacheConfig> sweep);

/// Verifies every trace, then replays them all into `out`, which must not exist and appears only
/// when it is whole. Finished head tasks wait in `out`.part, and a replay of the same goes on
/// from them; the run has the same bytes however often it was killed and on however many threads
/// and processes it ran. With `options.elsewhere` the head tasks of a trace are finished
/// together, and there may be one process only. Every process of `group` calls it; the leader alone
/// writes, calls back and returns the run. Throws std::runtime_error for a trace that does not
/// verify and for what RunFolder refuses, std::invalid_argument for two traces of one name and for
/// what ReplayJob refuses. When the work has begun, an error in one of several processes ends them
/// all.
std::optional<Run> replay_to(const ReplayRequest& request, const std::filesystem::path& out,
                             ProcessGroup& group);

/// The same in this process's memory, of traces that have been verified, in the order of
/// request.traces, which say what the run calls them: nothing is written.
Run replay_in_memory(const ReplayRequest& request, std::span<const TraceReader* const> traces);

}  // namespace kvlab
