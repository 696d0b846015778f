// Reads and writes budgets by head, as they are in budgets.json, policy.json and run.json.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "policies/budgets/budget.hpp"
#include "policies/cache_config.hpp"

namespace kvlab {
/// Parses budgets in tokens: one number, one per layer, or one per layer and KV head. null exempts
/// a layer from the budget. For any other value, throws std::runtime_error with a text that begins
/// with `where`. `file` is stored as the name of the file from which the budget was read.
Budget budget_from_json(const nlohmann::json& value, const std::string& where,
                        std::string file = {});

/// Parses what parse_budget() accepts, and also `@FILE`, where FILE is a file with budgets. Throws
/// std::runtime_error if the file cannot be read, and std::invalid_argument as parse_budget() does.
Budget read_budget(std::string_view text);

/// Converts budgets to JSON: a list with an entry for each layer. An entry is a list with one
/// budget per KV head, or null if the layer is exempt from the budget.
nlohmann::json budgets_json(const HeadBudgets& heads);
/// The same as JSON text.
std::string budgets_text(const HeadBudgets& heads);

// The sweep of a replay, as a user writes it: policies x budgets x prefill modes x positions.

/// Maximum number of configurations in one command. There is a limit because each configuration
/// needs a cache for every head.
inline constexpr std::size_t kMaxConfigs = 10'000;

/// Lists of policies, budgets and so on, in the form of the command line. The sweep has all their
/// combinations.
struct SweepRequest {
  std::vector<std::string> policies, budgets;
  std::vector<std::string> prefills{"dense"};
  std::vector<std::string> positions;  ///< empty: the default of each policy
  std::uint64_t seed = 0;
  double threshold = 0.01;
};

/// Makes every combination of policy, budget, prefill mode and positions once. `full` gives a
/// single configuration with budget `all`, and an oracle is combined only with original positions.
/// Throws std::invalid_argument if there are more than kMaxConfigs combinations, a name is unknown,
/// an evicting policy has no budget, or protected tokens do not fit a budget in tokens. Also throws
/// as read_budget() does. With `leave_out`, budgets that are too small for the protected tokens do
/// not throw but are left out, unless all budgets are too small.
std::vector<CacheConfig> make_sweep(const SweepRequest& request,
                                    std::span<const std::string_view> oracles,
                                    const CompiledPolicies& compiled,
                                    const LeaveOut& leave_out = nullptr);

}  // namespace kvlab
