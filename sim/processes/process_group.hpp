// The group of processes that mpirun started together, or a single process.
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
  /// Index of this process among the group's processes on this host. host_size() is the number of
  /// these processes.
  virtual int host_rank() const { return 0; }
  virtual int host_size() const { return 1; }

  /// Every process passes a text, and each of them gets all texts, by rank. The call returns when
  /// all processes have called it.
  virtual std::vector<std::string> exchange(const std::string& text) { return {text}; }
  /// Sends a message to the process with the given rank. Callable from any thread. May wait until
  /// that process calls poll().
  virtual void send(int, const std::string&) {}
  /// The next message to this process, if one has arrived. Callable from any thread.
  virtual std::optional<Message> poll() { return std::nullopt; }
  /// Makes the other processes end when this one ends. The caller then throws an exception that
  /// names the reason.
  virtual void abort() {}

  bool leads() const { return rank() == 0; }
};

/// Joins the other processes if mpirun (or srun with PMIx) started this one; otherwise returns a
/// group of one process. Only a process that joins others loads the MPI code, which is in
/// kvlab_mpi.so next to the program. So the program starts on machines without MPI. Throws
/// std::runtime_error if there are other processes and this build has no MPI support.
std::unique_ptr<ProcessGroup> join_process_group();

/// Whether this process is alone, or the first of the processes that mpirun started with one
/// command line. Only this process prints errors about that command line, so that they appear once.
/// Callable before join_process_group().
bool leads_command_line();

/// All processes call this function, each with its `action`. It returns when all actions have
/// ended. If no action has thrown, it returns true in every process. Otherwise it returns false in
/// all processes but the leader, and throws in the leader: the error of the process with the lowest
/// rank or, if there is only one process, the exception itself.
bool do_together(ProcessGroup& group, const std::function<void()>& action);

/// Distributes `items` over the processes of the group, with `threads` threads in each process. All
/// processes call this function, but only the leader's `items` are used. `compute` is called once
/// for each item, in any process and on any thread. `finished` is then called in the leader with
/// the item and the result of `compute`, on any thread. The call returns in the leader when all
/// items are finished. If an exception is thrown, the process in which the first one occurred
/// rethrows it.
void share_work(ProcessGroup& group, const std::vector<std::size_t>& items, unsigned threads,
                const std::function<std::string(std::size_t)>& compute,
                const std::function<void(std::size_t, const std::string&)>& finished);

}  // namespace kvlab
