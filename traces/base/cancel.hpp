// Work that whoever began it may call off: it ends at its next item or block.
#pragma once

#include <atomic>
#include <stdexcept>
#include <utility>

namespace kvlab {

/// Thrown where work was called off.
class Cancelled : public std::runtime_error {
 public:
  Cancelled() : std::runtime_error("called off") {}
};

/// While it lives, what this thread does, and parallel_for() for it, ends when `flag` is set. Null:
/// nothing is called off.
class Cancellable {
 public:
  using Flag = const std::atomic<bool>*;

  explicit Cancellable(Flag flag) : before_(std::exchange(of_thread(), flag)) {}
  ~Cancellable() { of_thread() = before_; }
  Cancellable(const Cancellable&) = delete;
  Cancellable& operator=(const Cancellable&) = delete;

  static Flag& of_thread() {
    static thread_local Flag flag = nullptr;
    return flag;
  }

 private:
  Flag before_;
};

/// Throws Cancelled where this thread's work was called off.
inline void throw_if_cancelled() {
  if (const Cancellable::Flag flag = Cancellable::of_thread(); flag && flag->load())
    throw Cancelled();
}

}  // namespace kvlab
