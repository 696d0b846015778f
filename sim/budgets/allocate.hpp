// Allocates budgets to heads, from each head's curve of error against budget.
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
using Curve = std::vector<CurvePoint>;  ///< ascending in tokens

/// The lower convex hull of a curve. It is never above the curve, and each further token reduces
/// the error less than the one before.
Curve lower_hull(const Curve& curve);
/// The error at `tokens`, on the line between two points of a hull. `tokens` must be in the hull's
/// range.
double error_at(const Curve& hull, std::uint32_t tokens);

/// Distributes `total` tokens over hulls so that the sum of their errors is minimal. Each hull
/// first gets the tokens of its first point. The remaining tokens go to the hull whose error
/// decreases most per token; among equal decreases, to the earlier hull. Throws
/// std::invalid_argument if `total` is less than the sum of all first points or more than the sum
/// of all last points.
std::vector<std::uint32_t> share_tokens(std::span<const Curve> hulls, std::uint64_t total);

/// What to allocate: a policy of the run, a metric, and a mean budget.
struct AllocationRequest {
  std::string policy = {};  ///< name of the policy, or its label in the run; empty: the only policy
  std::string metric = {};  ///< empty: kl_estimate if the run has it, otherwise residual_error
  Budget budget = {};
};

struct Allocation {
  std::string policy, metric;  ///< the policy's label in the run
  std::uint32_t mean_tokens = 0;
  HeadBudgets heads;
  std::vector<std::uint32_t> layers;  ///< the model's number of each layer in `heads`
  /// The metric that the lower_hull() of each head predicts, summed over the heads.
  double even = 0;    ///< sum if each head has `mean_tokens`
  double shared = 0;  ///< sum with the budgets in `heads`
};

/// Reads the run's metrics by head, at budgets that are the same for all heads. At the
/// trace's length, the error of a policy without tiers is 0, and that of a policy with tiers is the
/// error of `full` with the same tiers. Throws std::invalid_argument if the policy is missing or
/// ambiguous, if the run lacks that `full` or the metric by head, if it has fewer than three
/// budgets, only some layers or several models, or if the mean is outside the measured budgets.
Allocation allocate_budgets(const Run& run, const AllocationRequest& request);

}  // namespace kvlab
