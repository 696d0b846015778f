// Progress of long work in phases, reported as a share of its time.
#pragma once

#include <cstddef>
#include <functional>
#include <mutex>
#include <vector>

namespace kvlab {

// The time of a piece of work: wall clock and CPU.
struct WorkTime {
  double seconds = 0;      ///< wall clock
  double cpu_seconds = 0;  ///< of all threads together; does not depend on other programs
};

/// The clocks, in seconds.
double wall_clock();
double cpu_clock();

/// Measures the time of `work`.
template <class Work>
WorkTime measure_time(Work&& work) {
  const double wall = wall_clock(), cpu = cpu_clock();
  work();
  return {wall_clock() - wall, cpu_clock() - cpu};
}

/// A phase of the work. Phases of one kind take the same time per unit of work (a token, for
/// example).
struct WorkPhase {
  std::size_t kind;
  double work;  ///< in units of its kind
};

/// Estimates the remaining time from a rate for each kind of phase, because kinds may differ in
/// speed. The rate is the measured one if phases of that kind have run, and otherwise the expected
/// one.
class WorkPlan {
 public:
  /// `expected`: seconds per unit, by kind; 0: unknown. `progress` may be empty.
  WorkPlan(std::function<void(double)> progress, std::vector<WorkPhase> phases,
           std::vector<double> expected, std::function<double()> clock = wall_clock);

  /// Returns a function with which any thread can report the finished share of a phase. The first
  /// call of the function marks all earlier phases as finished. The plan must outlive the function.
  std::function<void(double)> phase(std::size_t phase);
  /// Corrects the amount of work of a phase.
  void set_work(std::size_t phase, double work);

 private:
  void show(std::size_t phase, double share);
  double seconds_of(std::size_t kind, double work) const;

  struct Measured {
    double work = 0, seconds = 0;
  };

  std::function<void(double)> progress_;
  std::vector<WorkPhase> phases_;
  std::vector<double> expected_;    // [kind]
  std::vector<Measured> measured_;  // [kind]: finished phases
  std::function<double()> clock_;
  double started_, began_, last_;  // times: start of the work, start of the phase, latest report
  std::size_t current_ = 0;
  double share_ = 0;  // finished share of the current phase
  std::mutex mutex_;
};

}  // namespace kvlab
