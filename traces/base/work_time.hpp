// What a piece of work takes: by the clock, and of the processor.
#pragma once

namespace kvlab {

struct WorkTime {
  double seconds = 0;      ///< by the clock
  double cpu_seconds = 0;  ///< of all threads together: what other programs do not disturb
};

/// The clocks, in seconds.
double wall_clock();
double cpu_clock();

/// Times `work`.
template <class Work>
WorkTime timed(Work&& work) {
  const double wall = wall_clock(), cpu = cpu_clock();
  work();
  return {wall_clock() - wall, cpu_clock() - cpu};
}

}  // namespace kvlab
