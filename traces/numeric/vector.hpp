// Sixteen floats at a time, in a fixed order, on any machine.
//
// Everything here is written so that a result depends neither on how many rows are computed
// together, nor on the instruction set, nor on the number of threads: no FMA contraction (a build
// flag), sums in a stated order. That is why a replay, the closed loop by layers and the
// token-by-token decoder reach equal bits, which no BLAS promises for one row and for many.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

// The hot loops are compiled for several instruction sets and chosen at run time. (Sanitised builds
// take the plain version: their run-time is not up yet when such a choice is made.)
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(KVLAB_PLAIN_LOOPS)
#define KVLAB_HOT __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define KVLAB_HOT
#endif

namespace kvlab {

inline constexpr std::size_t kLanes = 16;

typedef float Float16 __attribute__((vector_size(64)));
typedef std::int32_t Int16 __attribute__((vector_size(64)));

}  // namespace kvlab
