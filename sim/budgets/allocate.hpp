// Allocates budgets by head from the curve of each head's error over its budget.
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
using Curve = std::vector<CurvePoint>;  ///< tokens ascend

/// The lower convex hull. Its error is never above that of `curve`, and each further token reduces
/// the error less.
Curve lower_hull(const Curve& curve);
/// The error on the line between the points of a hull; `tokens` must lie in its range.
double error_at(const Curve& hull, std::uint32_t tokens);

/// Distributes `total` tokens over hulls so that the sum of their errors is minimal: each gets the
/// tokens of its first point, then the steepest decrease per token comes first; at equal decrease,
/// the earlier curve. Throws std::invalid_argument if `total` is less than all first points or more
/// than all last points together.
std::vector<std::uint32_t> share_tokens(std::span<const Curve> hulls, std::uint64_t total);

/// The request: a policy of the run, a metric, and a mean budget.
struct AllocationRequest {
  std::string policy = {};  ///< name, or label in the run; empty: the only policy
  std::string metric = {};  ///< empty: kl_estimate if the run has it, otherwise residual_error
  Budget budget = {};
};

struct Allocation {
  std::string policy, metric;  ///< the policy's label in the run
  std::uint32_t mean_tokens = 0;
  HeadBudgets heads;
  /// The metric, summed over heads by hull: with equal budgets, and with `heads`.
  double even = 0, shared = 0;
};

/// Reads the run's metrics by head at budgets that are the same for all heads, and assumes no error
/// at the trace's length. Throws std::invalid_argument if there is no such policy or several, the
/// run does not have the metric by head, it has fewer than three budgets or only some layers, or
/// the mean lies outside the measured budgets.
Allocation allocate_budgets(const Run& run, const AllocationRequest& request);

}  // namespace kvlab
