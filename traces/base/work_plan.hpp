// Progress of long work in phases, told as a share of its time.
#pragma once

#include <cstddef>
#include <functional>
#include <mutex>
#include <vector>

namespace kvlab {

// What a piece of work takes: by the clock, and of the processor.
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

/// A part of the work. Those of one kind take as long for each unit of their work (a token, say).
struct WorkPhase {
  std::size_t kind;
  double work;  ///< in units of its kind
};

/// What is left is reckoned from rates that were measured: those of the kinds that have been at
/// work, and of the others what is expected. So the time left holds over phases that are unlike.
class WorkPlan {
 public:
  /// `expected`: seconds a unit, by kind; 0: unknown. `progress` may be empty.
  WorkPlan(std::function<void(double)> progress, std::vector<WorkPhase> phases,
           std::vector<double> expected, std::function<double()> clock = wall_clock);

  /// What takes the share of a phase that is done, from any thread; its first call says that all
  /// phases before it are over. The plan must outlive it.
  std::function<void(double)> phase(std::size_t phase);
  /// A phase is more work, or less, than was thought.
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
  std::vector<Measured> measured_;  // [kind]: phases that are over
  std::function<double()> clock_;
  double started_, began_, last_;  // the work, the phase at work, the latest word of it
  std::size_t current_ = 0;
  double share_ = 0;  // of the phase at work that is done
  std::mutex mutex_;
};

}  // namespace kvlab
