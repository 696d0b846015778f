// The interactive page's scripts: Vega, our own (sim/report/page/), and what they show.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace kvlab {

/// A file of sim/report/page/, by its name. Throws std::out_of_range if there is none.
std::string_view page_file(std::string_view name);

/// The elements that end an interactive page: `data` as JSON that no text in it can leave, then the
/// scripts. `vega` is what vega_script() gave.
std::string script_elements(const nlohmann::ordered_json& data, std::string_view vega);

}  // namespace kvlab
