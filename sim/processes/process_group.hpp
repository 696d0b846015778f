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
  /// Which of the group's processes on this host, and how many there are.
  virtual int host_rank() const { return 0; }
  virtual int host_size() const { return 1; }

  /// Every process's text, by rank. Each must call it; none returns before all have.
  virtual std::vector<std::string> exchange(const std::string& text) { return {text}; }
  /// From any thread; may wait until the other process polls.
  virtual void send(int, const std::string&) {}
  /// The next message to this process, if one has come. From any thread.
  virtual std::optional<Message> poll() { return std::nullopt; }
  /// The others of the group end when this process does; the caller throws why.
  virtual void abort() {}

  bool leads() const { return rank() == 0; }
};

/// Joins the other processes if mpirun (or srun with PMIx) started this one; otherwise the process
/// is alone. MPI itself lies in kvlab_mpi.so beside the program and is loaded only then, so that
/// the program starts without it too. Throws std::runtime_error if there are others and this build
/// was configured without MPI.
std::unique_ptr<ProcessGroup> join_process_group();

/// Calls `action` in every process, and returns when all have. True if it threw in none; otherwise
/// the leader throws the first error by rank (alone: the exception itself) and the others get
/// false.
bool do_together(ProcessGroup& group, const std::function<void()>& action);

/// Computes every item of `items` once, each in one of the group's processes, `threads` at a time
/// in each. All processes call it; only the leader's `items` count. `compute` runs in any process
/// and from any thread; `finished` takes its result in the leader, from any thread. Returns in the
/// leader when all are finished. The first exception is rethrown in the process that it happened
/// in.
void share_work(ProcessGroup& group, const std::vector<std::size_t>& items, unsigned threads,
                const std::function<std::string(std::size_t)>& compute,
                const std::function<void(std::size_t, const std::string&)>& finished);

}  // namespace kvlab
