// Units of work over threads and processes: the leader hands them out one by one, so that a fast
// process gets more of them.
#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <future>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "sim/processes/process_group.hpp"
#include "traces/base/parallel.hpp"

namespace kvlab {
namespace {

using Compute = std::function<std::string(std::size_t)>;
using Finished = std::function<void(std::size_t, const std::string&)>;

constexpr auto kPause = std::chrono::microseconds(500);

/// Takes steps on several threads until one says that nothing is left, or throws.
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

/// The items that nobody has taken yet.
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

// What a worker says to the leader: kAsk, answered with an item, or with nothing when none is left;
// "item\nresult"; and nothing when it leaves.
constexpr const char* kAsk = "?";

std::optional<std::size_t> item_of(const std::string& text) {
  std::size_t item = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), item);
  if (error != std::errc{} || end == text.data()) return std::nullopt;
  return item;
}

/// The leader's side of the conversation, until every worker has left. `check` is called often and
/// may throw.
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
    queue.close();  // or `own` would be waited for until all is computed
    throw;
  }
}

/// A worker's next item. One question at a time, so that every answer finds who asked.
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
