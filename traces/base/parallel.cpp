#include "traces/base/parallel.hpp"

#ifdef __linux__
#include <pthread.h>
#include <sched.h>
#endif

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "traces/base/cancel.hpp"

namespace kvlab {
namespace {

/// One call of parallel_for(). Each thread that works on it takes the next item until none is left.
class Loop {
 public:
  Loop(std::size_t count, const std::function<void(std::size_t)>& body)
      : count_(count), body_(body) {}

  void work() {
    const Cancellable scope(caller_);
    for (std::size_t i = next_++; i < count_; i = next_++) {
      try {
        throw_if_cancelled();
        body_(i);
      } catch (...) {
        const std::lock_guard lock(failure_mutex_);
        if (!failure_) failure_ = std::current_exception();
        next_ = count_;
      }
    }
  }

  void rethrow() const {
    if (failure_) std::rethrow_exception(failure_);
  }

  std::size_t helpers_wanted = 0;  ///< the pool's mutex guards this and the next member
  std::size_t helpers_working = 0;

 private:
  const std::size_t count_;
  const std::function<void(std::size_t)>& body_;
  const Cancellable::Flag caller_ = Cancellable::current();
  std::atomic<std::size_t> next_{0};
  std::exception_ptr failure_;
  std::mutex failure_mutex_;
};

/// Helper threads. A caller of parallel_for() works on its loop itself, and idle helpers join it.
/// So loops may be nested, and started from several threads at once, without waiting for each
/// other.
class Pool {
 public:
  Pool() = default;
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  ~Pool() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wanted_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void run(Loop& loop, std::size_t helpers) {
    offer(loop, helpers);
    loop.work();
    withdraw(loop);
  }

 private:
  void offer(Loop& loop, std::size_t helpers) {
    {
      const std::lock_guard lock(mutex_);
      while (threads_.size() < helpers) threads_.emplace_back([this] { serve(); });
      loop.helpers_wanted = helpers;
      open_.push_back(&loop);
    }
    if (helpers == 1)
      wanted_.notify_one();
    else
      wanted_.notify_all();
  }

  /// Lets no more helpers join the loop, and returns when none works on it any more.
  void withdraw(Loop& loop) {
    std::unique_lock lock(mutex_);
    loop.helpers_wanted = 0;
    std::erase(open_, &loop);
    finished_.wait(lock, [&] { return loop.helpers_working == 0; });
  }

  void serve() {
    std::unique_lock lock(mutex_);
    while (true) {
      wanted_.wait(lock, [&] { return stopping_ || !open_.empty(); });
      if (stopping_) return;
      Loop& loop = *open_.front();
      if (--loop.helpers_wanted == 0) open_.pop_front();
      ++loop.helpers_working;
      lock.unlock();
      loop.work();
      lock.lock();
      if (--loop.helpers_working == 0) finished_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wanted_, finished_;
  std::deque<Loop*> open_;  ///< loops that want more helpers, oldest first
  std::vector<std::thread> threads_;
  bool stopping_ = false;
};

/// Created when the first loop needs helper threads.
std::unique_ptr<Pool>& the_pool() {
  static std::unique_ptr<Pool> pool = std::make_unique<Pool>();
  return pool;
}

/// Gives a forked child process a new pool, because it inherits the pool's memory but none of its
/// threads. The old pool is leaked, because it cannot be destroyed.
void replace_pool() {
  static_cast<void>(the_pool().release());
  the_pool() = std::make_unique<Pool>();
}

Pool& pool() {
  static const int registered = ::pthread_atfork(nullptr, nullptr, replace_pool);
  static_cast<void>(registered);
  return *the_pool();
}

}  // namespace

unsigned default_threads() {
#ifdef __linux__
  cpu_set_t cores;
  if (::sched_getaffinity(0, sizeof(cores), &cores) == 0)
    return std::max(1u, static_cast<unsigned>(CPU_COUNT(&cores)));
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

void parallel_for(std::size_t count, unsigned threads,
                  const std::function<void(std::size_t)>& body) {
  if (threads <= 1 || count <= 1) {
    for (std::size_t i = 0; i < count; ++i) {
      throw_if_cancelled();
      body(i);
    }
    return;
  }
  Loop loop(count, body);
  pool().run(loop, std::min<std::size_t>(threads, count) - 1);
  loop.rethrow();
}

}  // namespace kvlab
