// One exact attention pass over a trace. Its time is the baseline with which the time of a replay
// is compared.
#pragma once

#include "traces/base/work_plan.hpp"
#include "traces/trace.hpp"

namespace kvlab {

struct ExactPass {
  WorkTime time;
  double flops = 0;  ///< floating-point operations of its products
};

/// Computes the attention of every query of every head over the whole trace with OpenBLAS. After
/// RoPE, it computes for each block of queries: Q K^T (sgemm), causal softmax, P V (sgemm). Heads
/// are distributed over `threads` threads. Throws std::runtime_error if OpenBLAS cannot be loaded.
ExactPass exact_pass(const TraceReader& trace, unsigned threads);

}  // namespace kvlab
