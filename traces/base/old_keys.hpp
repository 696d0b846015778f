// Old names of keys in policy.json, run.json and other results. Versions before 0.6 wrote them, and
// this release still reads them.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string_view>

namespace kvlab {

/// Gives every key within `json` its current name, unless the object already has a key of that
/// name. Does not change `capture`, the description of a trace, because traces keep their old keys.
void rename_old_keys(nlohmann::json& json);

/// parse_json() and rename_old_keys() of a file that kvlab wrote.
nlohmann::json parse_result_json(std::string_view text, std::string_view what);

}  // namespace kvlab
