// Budgets by head as files hold them: budgets.json, policy.json, run.json.
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
/// Tokens: one number, one for each layer, or for each layer and KV head; null exempts a layer.
/// Throws std::runtime_error that begins with `where`. `file` is the budget's.
Budget budget_from_json(const nlohmann::json& value, const std::string& where,
                        std::string file = {});

/// What parse_budget takes, and `@FILE`. Throws std::runtime_error for a file that cannot be read,
/// std::invalid_argument as parse_budget does.
Budget read_budget(std::string_view text);

/// A list by layer of lists by KV head, or of null.
nlohmann::json budgets_json(const HeadBudgets& heads);
/// Likewise, as JSON text.
std::string budgets_text(const HeadBudgets& heads);

// The sweep of a replay, as people write it: policies x budgets x prefill and position modes.

/// Of one command: each has caches of its own for every head.
inline constexpr std::size_t kMaxConfigs = 10'000;

/// The lists that are multiplied, each entry as on the command line.
struct SweepRequest {
  std::vector<std::string> policies, budgets;
  std::vector<std::string> prefills{"dense"};
  std::vector<std::string> positions;  ///< empty: each policy's own
  std::uint64_t seed = 0;
  double threshold = 0.01;
};

/// Every policy x budget x prefill x positions, each once. `full` is one row with budget `all`, and
/// a reference comes with original positions only. Throws std::invalid_argument: lists whose
/// product is above kMaxConfigs, an unknown name, a policy that evicts without a budget, protected
/// tokens that do not fit a budget in tokens; and as read_budget(). With `leave_out`, protected
/// tokens that do not fit some of the budgets leave these out.
std::vector<CacheConfig> make_sweep(const SweepRequest& request,
                                    std::span<const std::string_view> oracles,
                                    const CompiledPolicies& compiled,
                                    const LeaveOut& leave_out = nullptr);

}  // namespace kvlab
