// What the card can do at most, measured in the same run as what is compared with it.
#pragma once

#include "kernels/types.hpp"

namespace kvlab::cuda {

/// Bytes per second of reading memory much larger than the L2 cache, once.
double read_bytes_per_second();
/// Operations per second of a large product of random matrices by cuBLASLt, sums in float32.
double matrix_flops_per_second(kernels::Type type);

}  // namespace kvlab::cuda
