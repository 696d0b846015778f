// A loop over independent items on several threads.
#pragma once

#include <cstddef>
#include <functional>

namespace kvlab {

/// Number of cores on which this process may run. A launcher such as mpirun may allow fewer than
/// the machine has.
unsigned default_threads();

/// Calls body(i) for i in [0, count). Hands out items in order to `threads` threads and returns
/// when all are done. If a call throws, or the caller's work is cancelled, the items that have not
/// started are dropped, and the first exception (or Cancelled) is thrown.
void parallel_for(std::size_t count, unsigned threads,
                  const std::function<void(std::size_t)>& body);

}  // namespace kvlab
