// Runs long work on another thread, so that other Python threads continue and Ctrl-C can end it.
#pragma once

#include <functional>
#include <optional>
#include <utility>

#include "tools/python/src/bindings.hpp"

namespace kvlab::python {

/// Runs `work` on another thread, without the GIL. If a signal raises an exception
/// (KeyboardInterrupt), cancels the work, waits for its end and throws the exception. Also throws
/// the exceptions of `work`.
void call_long(const std::function<void()>& work);

/// Like call_long(), for work that returns a result.
template <class Work>
auto result_of_long(Work&& work) {
  std::optional<decltype(work())> result;
  call_long([&] { result.emplace(work()); });
  return std::move(*result);
}

/// A C++ progress hook that calls `callback(fraction)`, at most ten times a second and at the end.
/// None gives an empty hook.
std::function<void(double)> progress_to(nb::object callback);

}  // namespace kvlab::python
