// One exact pass of attention over a trace: what the time of a replay is held against.
#pragma once

#include "traces/base/work_plan.hpp"
#include "traces/trace.hpp"

namespace kvlab {

struct ExactPass {
  WorkTime time;
  double flops = 0;  ///< of its products
};

/// Attention of every query of every head over the whole trace, by OpenBLAS: RoPE, then by blocks
/// of queries Q K^T (sgemm), causal softmax, P V (sgemm); the heads over `threads` threads. Throws
/// std::runtime_error where OpenBLAS cannot be loaded.
ExactPass exact_pass(const TraceReader& trace, unsigned threads);

}  // namespace kvlab
