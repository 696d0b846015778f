#include "tools/python/src/long_call.hpp"

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <mutex>

#include "traces/base/cancel.hpp"

namespace kvlab::python {
namespace {

constexpr auto kBetweenSignals = std::chrono::milliseconds(50);
constexpr auto kBetweenCalls = std::chrono::milliseconds(100);

/// If a signal has raised a Python exception, sets `off`, which cancels the work, and waits until
/// the work has ended.
void call_off_on_signal(std::atomic<bool>& off, std::future<void>& work) {
  const nb::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) return;
  nb::python_error error;
  off = true;
  {
    const nb::gil_scoped_release no_gil;
    work.wait();
  }
  throw error;
}

}  // namespace

void call_long(const std::function<void()>& work) {
  std::atomic<bool> off{false};
  const nb::gil_scoped_release no_gil;
  std::future<void> done = std::async(std::launch::async, [&] {
    const Cancellable scope(&off);
    work();
  });
  while (done.wait_for(kBetweenSignals) != std::future_status::ready) call_off_on_signal(off, done);
  done.get();
}

std::function<void(double)> progress_to(nb::object callback) {
  if (callback.is_none()) return nullptr;
  struct Shown {
    nb::object callback;
    std::mutex mutex;
    std::chrono::steady_clock::time_point last{};
    ~Shown() {
      const nb::gil_scoped_acquire gil;
      callback.reset();
    }
  };
  auto shown = std::make_shared<Shown>();
  shown->callback = std::move(callback);
  return [shown](double fraction) {
    {
      const std::lock_guard lock(shown->mutex);
      const auto now = std::chrono::steady_clock::now();
      if (fraction < 1 && now - shown->last < kBetweenCalls) return;
      shown->last = now;
    }
    const nb::gil_scoped_acquire gil;
    shown->callback(fraction);
  };
}

}  // namespace kvlab::python
