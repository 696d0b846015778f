// Divides items evenly among a fixed number of workers.
#pragma once

#include <cuda_runtime.h>

namespace kvlab::kernels {

/// Splits `items` consecutive items into `workers` runs whose lengths differ by at most one. Longer
/// runs come first.
struct EvenShare {
  int each, longer;  ///< the first `longer` workers have each + 1 items
  __device__ EvenShare(int items, int workers) : each(items / workers), longer(items % workers) {}

  /// The first item of a worker. For `worker` == the number of workers, the number of items.
  __device__ int begin(int worker) const { return worker * each + min(worker, longer); }
  __device__ int worker_of(int item) const {
    const int longer_items = longer * (each + 1);
    return item < longer_items ? item / (each + 1) : longer + (item - longer_items) / each;
  }
};

}  // namespace kvlab::kernels
