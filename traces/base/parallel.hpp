// A loop over independent items on several threads.
#pragma once

#include <cstddef>
#include <functional>

namespace kvlab {

/// The cores that this process may run on: a launcher such as mpirun may give it fewer than there
/// are.
unsigned default_threads();

/// Calls body(i) for i in [0, count), items handed out in order to `threads` threads; returns when
/// all are done. The first exception is rethrown, and the items not yet started are dropped; they
/// are too, and Cancelled is thrown, where the caller's work is called off.
void parallel_for(std::size_t count, unsigned threads,
                  const std::function<void(std::size_t)>& body);

}  // namespace kvlab
