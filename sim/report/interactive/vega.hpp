// Vega, the library that draws pages: found where Debian's libjs-vega puts it.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace kvlab {

/// What to say where vega_script() finds nothing.
inline constexpr std::string_view kNoVega =
    "the page has tables and no figures, for want of Vega (Debian: libjs-vega; elsewhere: its "
    "folder as KVLAB_VEGA)";

/// Vega's modules as one script behind their licence. From the folder that the environment's
/// KVLAB_VEGA names, or else Debian's. Nothing where a module is missing.
std::optional<std::string> vega_script();

}  // namespace kvlab
