#include "sim/processes/process_group.hpp"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <future>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "traces/base/parallel.hpp"

namespace kvlab {
namespace {

constexpr const char* kModule = "kvlab_mpi.so";

/// Open MPI's mpirun sets OMPI_COMM_WORLD_SIZE, and every launcher with PMIx sets PMIX_RANK.
bool has_other_processes() {
  const char* size = std::getenv("OMPI_COMM_WORLD_SIZE");
  return size ? std::string(size) != "1" : std::getenv("PMIX_RANK") != nullptr;
}

// Distributes units of work over threads and processes. The leader sends them out one by one, so a
// fast process gets more of them than a slow one.

using Compute = std::function<std::string(std::size_t)>;
using Finished = std::function<void(std::size_t, const std::string&)>;

constexpr auto kPause = std::chrono::microseconds(500);

/// Calls `step` again and again on each of several threads, until a call returns false or throws.
void repeat(unsigned threads, const std::function<bool()>& step) {
  std::atomic<bool> stop = false;
  parallel_for(threads, threads, [&](std::size_t) {
    try {
      while (!stop && step()) {
      }
    } catch (...) {
      stop = true;
      throw;
    }
  });
}

/// The items that have not been taken yet.
class Queue {
 public:
  explicit Queue(const std::vector<std::size_t>& items) : items_(items) {}
  std::optional<std::size_t> take() {
    const std::size_t i = next_++;
    return i < items_.size() ? std::optional(items_[i]) : std::nullopt;
  }
  void close() { next_ = items_.size(); }

 private:
  const std::vector<std::size_t>& items_;
  std::atomic<std::size_t> next_ = 0;
};

// A worker sends three kinds of messages to the leader. kAsk requests an item; the leader replies
// with an item, or with an empty text if none is left. "item\nresult" is the result of an item. An
// empty text means that the worker ends.
constexpr const char* kAsk = "?";

std::optional<std::size_t> item_of(const std::string& text) {
  std::size_t item = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), item);
  if (error != std::errc{} || end == text.data()) return std::nullopt;
  return item;
}

/// Receives and answers the messages of the workers until every worker has ended. It runs in the
/// leader. `check` is called often and may throw.
void serve(ProcessGroup& group, Queue& queue, const Finished& finished,
           const std::function<void()>& check) {
  for (int workers = group.size() - 1; workers > 0; check())
    while (const auto message = group.poll()) {
      if (message->bytes.empty()) {
        --workers;
      } else if (message->bytes == kAsk) {
        const auto item = queue.take();
        group.send(message->from, item ? std::to_string(*item) : "");
      } else {
        finished(item_of(message->bytes).value(),
                 message->bytes.substr(message->bytes.find('\n') + 1));
      }
    }
}

void lead(ProcessGroup& group, const std::vector<std::size_t>& items, unsigned threads,
          const Compute& compute, const Finished& finished) {
  Queue queue(items);
  const auto own_work = [&] {
    repeat(threads, [&] {
      const auto item = queue.take();
      if (item) finished(*item, compute(*item));
      return item.has_value();
    });
  };
  if (group.size() == 1) return own_work();

  auto own = std::async(std::launch::async, own_work);
  try {
    serve(group, queue, finished, [&] {
      if (!own.valid())
        std::this_thread::sleep_for(kPause);
      else if (own.wait_for(kPause) == std::future_status::ready)
        own.get();
    });
    if (own.valid()) own.get();
  } catch (...) {
    queue.close();  // so that `own` does not compute all remaining items
    throw;
  }
}

/// Requests a worker's next item. Only one thread at a time sends a request, so that each reply
/// goes to the thread that requested it.
std::optional<std::size_t> ask(ProcessGroup& group, std::mutex& asking) {
  const std::lock_guard lock(asking);
  for (group.send(0, kAsk);; std::this_thread::sleep_for(kPause))
    if (const auto message = group.poll()) return item_of(message->bytes);
}

void follow(ProcessGroup& group, unsigned threads, const Compute& compute) {
  std::mutex asking;
  repeat(threads, [&] {
    const auto item = ask(group, asking);
    if (item) group.send(0, std::to_string(*item) + "\n" + compute(*item));
    return item.has_value();
  });
  group.send(0, "");
}

}  // namespace

std::unique_ptr<ProcessGroup> join_process_group() {
  if (!has_other_processes()) return std::make_unique<ProcessGroup>();
  std::error_code error;
  const auto module =
      std::filesystem::read_symlink("/proc/self/exe", error).parent_path() / kModule;
  if (!std::filesystem::exists(module))
    throw std::runtime_error(
        "several processes were started, but this build has no MPI; install libopenmpi-dev, "
        "configure and build again, or run one process");
  // RTLD_GLOBAL is necessary because Open MPI loads further modules, which look up its symbols
  // among the global ones. The library is never closed, because MPI's threads and handlers keep
  // running.
  void* const library = ::dlopen(module.c_str(), RTLD_NOW | RTLD_GLOBAL);
  void* const join = library ? ::dlsym(library, "kvlab_join_mpi") : nullptr;
  if (!join) throw std::runtime_error(fmt::format("MPI cannot be loaded: {}", ::dlerror()));
  return std::unique_ptr<ProcessGroup>(reinterpret_cast<ProcessGroup* (*)()>(join)());
}

bool leads_command_line() {
  const char* const rank = std::getenv("OMPI_COMM_WORLD_RANK");
  // Number of processes of each command line.
  const char* const counts = std::getenv("OMPI_APP_CTX_NUM_PROCS");
  if (!rank || !counts) return true;
  std::istringstream list(counts);
  int own = std::atoi(rank);
  for (int count = 0; own > 0 && list >> count;) own -= count;
  return own == 0;
}

bool do_together(ProcessGroup& group, const std::function<void()>& action) {
  std::string problem;
  try {
    action();
  } catch (const std::exception& error) {
    if (group.size() == 1) throw;
    problem = *error.what() ? error.what() : "an unknown error";
  }
  const auto said = group.exchange(problem);
  const auto first =
      std::find_if(said.begin(), said.end(), [](const auto& text) { return !text.empty(); });
  if (first == said.end()) return true;
  if (!group.leads()) return false;
  throw std::runtime_error(
      first == said.begin()
          ? *first
          : fmt::format("process {} of {}: {}", first - said.begin(), said.size(), *first));
}

void share_work(ProcessGroup& group, const std::vector<std::size_t>& items, unsigned threads,
                const Compute& compute, const Finished& finished) {
  if (group.leads())
    lead(group, items,
         std::max(1u, std::min<unsigned>(threads, static_cast<unsigned>(items.size()))), compute,
         finished);
  else
    follow(group, threads, compute);
}

}  // namespace kvlab
