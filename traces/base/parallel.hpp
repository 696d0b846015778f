// A loop over independent items on several threads.
#pragma once

#include <cstddef>
#include <functional>

namespace kvlab {

/// Number of cores on which this process may run. A launcher such as mpirun may allow fewer than
/// the machine has.
unsigned default_threads();

/// Calls body(i) for i in [0, count). Hands out items in order to `threads` threads and returns
/// when all are done. Rethrows the first exception and drops the items that have not started. Also
/// drops them and throws Cancelled if the caller's work is cancelled.
void parallel_for(std::size_t count, unsigned threads,
                  const std::function<void(std::size_t)>& body);

}  // namespace kvlab
