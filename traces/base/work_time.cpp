#include "traces/base/work_time.hpp"

#include <ctime>

namespace kvlab {
namespace {

double read_clock(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace

double wall_clock() { return read_clock(CLOCK_MONOTONIC); }
double cpu_clock() { return read_clock(CLOCK_PROCESS_CPUTIME_ID); }

}  // namespace kvlab
