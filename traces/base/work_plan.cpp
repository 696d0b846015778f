#include "traces/base/work_plan.hpp"

#include <algorithm>
#include <ctime>
#include <utility>

namespace kvlab {
namespace {

// The measured rate of a phase is used once this share of the phase is finished.
constexpr double kTelling = 0.1;

}  // namespace

WorkPlan::WorkPlan(std::function<void(double)> progress, std::vector<WorkPhase> phases,
                   std::vector<double> expected, std::function<double()> clock)
    : progress_(std::move(progress)),
      phases_(std::move(phases)),
      expected_(std::move(expected)),
      measured_(expected_.size()),
      clock_(std::move(clock)),
      started_(clock_()),
      began_(started_),
      last_(started_) {
  if (progress_) progress_(0);
}

std::function<void(double)> WorkPlan::phase(std::size_t phase) {
  return [this, phase](double share) { show(phase, share); };
}

void WorkPlan::set_work(std::size_t phase, double work) {
  const std::lock_guard lock(mutex_);
  phases_[phase].work = work;
}

double WorkPlan::seconds_of(std::size_t kind, double work) const {
  Measured rate = measured_[kind];
  const WorkPhase& now = phases_[current_];
  if (now.kind == kind && (share_ >= kTelling || expected_[kind] == 0)) {
    rate.work += share_ * now.work;
    rate.seconds += last_ - began_;
  }
  return work * (rate.work > 0 ? rate.seconds / rate.work : expected_[kind]);
}

void WorkPlan::show(std::size_t phase, double share) {
  const std::lock_guard lock(mutex_);
  if (phase > current_) {
    Measured& rate = measured_[phases_[current_].kind];
    rate.work += phases_[current_].work;
    rate.seconds += last_ - began_;
    current_ = phase;
    began_ = last_;
  }
  last_ = clock_();
  share_ = std::clamp(share, 0.0, 1.0);
  if (!progress_) return;
  double left = seconds_of(phases_[current_].kind, (1 - share_) * phases_[current_].work);
  for (std::size_t p = current_ + 1; p < phases_.size(); ++p)
    left += seconds_of(phases_[p].kind, phases_[p].work);
  const double past = last_ - started_;
  if (past + left > 0) progress_(past / (past + left));
}

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
