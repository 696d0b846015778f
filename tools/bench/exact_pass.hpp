// One exact pass of attention over a trace by OpenBLAS: the yardstick of `kvlab bench replay`.
#pragma once

#include "sim/exact_pass.hpp"
#include "traces/trace.hpp"

namespace kvlab {

/// Attention of every query of every head over the whole trace: RoPE, then by blocks of queries
/// Q K^T (sgemm), causal softmax, P V (sgemm); the heads over `threads` threads. Throws
/// std::runtime_error in a build without OpenBLAS.
ExactPass exact_pass(const TraceReader& trace, unsigned threads);

}  // namespace kvlab
