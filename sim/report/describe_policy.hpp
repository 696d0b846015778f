// The description of a policy, as text for users and as JSON for programs.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "policies/entry.hpp"

namespace kvlab {

/// "nothing", "mass", "requests" or "mass, requests".
std::string_view name_of(Needs needs);
/// "nested" or "feedback".
std::string_view name_of(Order order);
/// The token features that the policy declares.
std::vector<std::string> features_of(const PolicyInfo& info);

/// The complete description as JSON: name, needs, protected tokens, modifiers, parameters, bytes,
/// citation.
nlohmann::ordered_json describe_policy(const PolicyEntry& entry);

}  // namespace kvlab
