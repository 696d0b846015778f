// Runs long work while other Python threads continue, so that Ctrl-C can end it.
#pragma once

#include <functional>
#include <optional>
#include <utility>

#include "tools/python/src/bindings.hpp"

namespace kvlab::python {

/// Runs `work` on another thread, without the GIL. A signal's exception (KeyboardInterrupt) cancels
/// the work, and is thrown when the work has ended. Exceptions of `work` are thrown, too.
void call_long(const std::function<void()>& work);

/// The same for work with a result.
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
