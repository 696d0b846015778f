// Budgets by head from how each head's error falls with its budget.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "policies/budgets/budget.hpp"
#include "sim/run/run.hpp"

namespace kvlab {

struct CurvePoint {
  std::uint32_t tokens;
  double error;
};
using Curve = std::vector<CurvePoint>;  ///< ascending tokens

/// The lower convex hull: its error is never above `curve`'s, and each further token gains less.
Curve lower_hull(const Curve& curve);
/// Between the points of a hull, along the line; `tokens` within its range.
double error_at(const Curve& hull, std::uint32_t tokens);

/// `total` tokens over hulls so that the sum of their errors is least: each from its first point
/// on, then the steepest fall per token first; of falls alike the earlier curve's. Throws
/// std::invalid_argument if `total` is less than all first points or more than all last ones.
std::vector<std::uint32_t> share_tokens(std::span<const Curve> hulls, std::uint64_t total);

/// What to allocate: of a run's policy, by a metric, at a mean.
struct AllocationRequest {
  std::string policy = {};  ///< name, or as labelled in the run; empty: the only one
  std::string metric = {};  ///< empty: kl_estimate where the run has it, else residual_error
  Budget budget = {};
};

struct Allocation {
  std::string policy, metric;  ///< the policy's label in the run
  std::uint32_t mean_tokens = 0;
  HeadBudgets heads;
  double even = 0,
         shared = 0;  ///< the metric, summed over heads by hull: at one budget, at `heads`
};

/// From the run's metrics by head at the budgets that all heads had alike, and no error at the
/// trace's length. Throws std::invalid_argument: no such policy or several, a metric that the run
/// does not have by head, fewer than three budgets, some layers only, a mean outside the measured
/// ones.
Allocation allocate_budgets(const Run& run, const AllocationRequest& request);

}  // namespace kvlab
