// Budgets by head as files hold them: budgets.json, policy.json, run.json.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "policies/budgets/budget.hpp"

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

}  // namespace kvlab
