// Work that may take long: other Python threads go on, and Ctrl-C ends it.
#pragma once

#include <functional>
#include <optional>
#include <utility>

#include "tools/python/src/bindings.hpp"

namespace kvlab::python {

/// Runs `work`, which holds no GIL, on a thread of its own. A signal's exception
/// (KeyboardInterrupt) calls the work off, and comes out when it has ended. So does what `work`
/// throws.
void call_long(const std::function<void()>& work);

/// The same of work with a result.
template <class Work>
auto result_of_long(Work&& work) {
  std::optional<decltype(work())> result;
  call_long([&] { result.emplace(work()); });
  return std::move(*result);
}

/// A progress hook for C++ that calls `callback(fraction)`, ten times a second at most and at the
/// end. None gives none.
std::function<void(double)> progress_to(nb::object callback);

}  // namespace kvlab::python
