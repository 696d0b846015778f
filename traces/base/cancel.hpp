// Work that another thread or a signal may cancel. Cancelled work ends at its next item or block.
#pragma once

#include <atomic>
#include <stdexcept>
#include <utility>

namespace kvlab {

/// Thrown by work that was cancelled.
class Cancelled : public std::runtime_error {
 public:
  Cancelled() : std::runtime_error("cancelled") {}
};

/// While this object exists, setting `flag` cancels the work of this thread and of the
/// parallel_for() calls that the thread makes. With a null `flag`, the work cannot be cancelled.
class Cancellable {
 public:
  using Flag = const std::atomic<bool>*;

  explicit Cancellable(Flag flag) : before_(std::exchange(current(), flag)) {}
  ~Cancellable() { current() = before_; }
  Cancellable(const Cancellable&) = delete;
  Cancellable& operator=(const Cancellable&) = delete;

  static Flag& current() {
    static thread_local Flag flag = nullptr;
    return flag;
  }

 private:
  Flag before_;
};

/// Throws Cancelled if this thread's work was cancelled.
inline void throw_if_cancelled() {
  if (const Cancellable::Flag flag = Cancellable::current(); flag && flag->load())
    throw Cancelled();
}

}  // namespace kvlab
