// The interactive page's scripts: Vega, our own (sim/report/page/), and what they show.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace kvlab {

// Vega, the library that draws pages: found where Debian's libjs-vega puts it.

/// What to say where vega_script() finds nothing.
inline constexpr std::string_view kNoVega =
    "the page has tables and no figures, for want of Vega (Debian: libjs-vega; elsewhere: its "
    "folder as KVLAB_VEGA)";

/// Vega's modules as one script behind their licence. From the folder that the environment's
/// KVLAB_VEGA names, or else Debian's. Nothing where a module is missing.
std::optional<std::string> vega_script();

/// A file of sim/report/page/, by its name. Throws std::out_of_range if there is none.
std::string_view page_file(std::string_view name);

/// The elements that end an interactive page: `data` as JSON that no text in it can leave, then the
/// scripts. `vega` is what vega_script() gave.
std::string script_elements(const nlohmann::ordered_json& data, std::string_view vega);

}  // namespace kvlab
