// The grid that `kvlab tune` searches: policies with their guards and parameters varied.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "policies/catalogue.hpp"

namespace kvlab {

/// The policies that stand where none is named: all that evict but `random`, those with columns,
/// which not every device has, and those that keep all they decode (`once`).
std::vector<std::string> tunable_policies(const CompiledPolicies& compiled);

/// `text` as asked for where it names settings ("h2o:recent=25%"). A bare name stands for its
/// variants: 0 and 4 sinks, and the policy's own; shares of 25, 50, 75 and 90% that are recent (not
/// where the oldest leave anyway), and the policy's own; and each parameter, one at a time, at its
/// default and nearby within its range. The policy's own modifiers stay. Variants whose guards do
/// not fit the budget are left out. Throws std::invalid_argument for what parse_policy() refuses,
/// and a policy that never evicts.
std::vector<PolicySpec> policy_variants(const std::string& text, std::uint32_t budget_tokens,
                                        const CompiledPolicies& compiled);

/// Values of a parameter around its default, ascending, within its range.
std::vector<double> parameter_values(double standard, double least, double most);

}  // namespace kvlab
