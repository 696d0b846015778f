// One exact pass of attention over a trace by OpenBLAS: the yardstick of `kvlab bench replay`.
#pragma once

#include "traces/trace.hpp"

namespace kvlab {

/// What a piece of work took.
struct WorkTime {
  double seconds = 0;      ///< by the clock
  double cpu_seconds = 0;  ///< of all threads together: what other programs do not disturb
};

/// Times `work`.
template <class Work>
WorkTime timed(Work&& work);

struct ExactPass {
  WorkTime time;
  double flops = 0;  ///< of its products
};

/// Attention of every query of every head over the whole trace: RoPE, then by blocks of queries
/// Q K^T (sgemm), causal softmax, P V (sgemm); the heads over `threads` threads. Throws
/// std::runtime_error in a build without OpenBLAS.
ExactPass exact_pass(const TraceReader& trace, unsigned threads);

/// The clocks, in seconds.
double wall_clock();
double cpu_clock();

template <class Work>
WorkTime timed(Work&& work) {
  const double wall = wall_clock(), cpu = cpu_clock();
  work();
  return {wall_clock() - wall, cpu_clock() - cpu};
}

}  // namespace kvlab
