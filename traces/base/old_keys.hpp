// Keys that versions before 0.6 wrote in policy.json, run.json and other results, which have other
// names since. They are read for one release more.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string_view>

namespace kvlab {

/// Gives every key within `json` its name of today. A key stays if its new name stands beside it.
/// What a trace says of itself (`capture`) stays as it is: traces keep their keys.
void rename_old_keys(nlohmann::json& json);

/// parse_json() of a file that kvlab wrote, with the keys of today.
nlohmann::json parse_result_json(std::string_view text, std::string_view what);

}  // namespace kvlab
