// The processes that mpirun started together, or one process alone.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace kvlab {

class ProcessGroup {
 public:
  struct Message {
    int from;
    std::string bytes;
  };

  virtual ~ProcessGroup() = default;
  virtual int rank() const { return 0; }
  virtual int size() const { return 1; }
  /// Index of this process among the group's processes on this host; host_size(): their number.
  virtual int host_rank() const { return 0; }
  virtual int host_size() const { return 1; }

  /// Returns every process's text, by rank. Collective: returns when all processes have called it.
  virtual std::vector<std::string> exchange(const std::string& text) { return {text}; }
  /// Sends a message; callable from any thread. May wait until the other process polls.
  virtual void send(int, const std::string&) {}
  /// The next message to this process, if one has arrived. Callable from any thread.
  virtual std::optional<Message> poll() { return std::nullopt; }
  /// Makes the other processes end when this one ends; the caller then throws the reason.
  virtual void abort() {}

  bool leads() const { return rank() == 0; }
};

/// Joins the other processes if mpirun (or srun with PMIx) started this one; otherwise the process
/// is alone. MPI is in kvlab_mpi.so beside the program and is loaded only then, so the program
/// starts without MPI. Throws std::runtime_error if there are other processes and this build has no
/// MPI support.
std::unique_ptr<ProcessGroup> join_process_group();

/// Whether this process is alone, or the first of those that mpirun started with one command line.
/// It prints what is wrong with that line. Callable before the processes join.
bool leads_command_line();

/// Calls `action` in every process and returns when all calls have ended. Returns true if none
/// threw. Otherwise the leader throws the first error by rank (a lone process: the exception
/// itself) and the others return false.
bool do_together(ProcessGroup& group, const std::function<void()>& action);

/// Computes every item of `items` once, in one of the group's processes, on `threads` threads per
/// process. All processes call it; only the leader's `items` count. `compute` runs in any process
/// and on any thread; `finished` receives its result in the leader, on any thread. Returns in the
/// leader when all items are finished. Rethrows the first exception in the process where it
/// occurred.
void share_work(ProcessGroup& group, const std::vector<std::size_t>& items, unsigned threads,
                const std::function<std::string(std::size_t)>& compute,
                const std::function<void(std::size_t, const std::string&)>& finished);

}  // namespace kvlab
