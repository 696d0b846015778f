// A page: one self-contained HTML file. The C++ code writes its data as JSON. In the browser, the
// scripts of sim/report/page make all texts, tables and figures from that data.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace kvlab {

/// The contents of a page.
struct PageDocument {
  /// The data for the page's scripts. Its key `kind` names the function that builds the page
  /// (kPages in sim/report/page/main.js).
  nlohmann::ordered_json data;
  std::string text;  ///< shown where JavaScript is turned off
};

/// The page as one HTML file, which makes no network requests. If Vega was not found, the page has
/// no figures, and a note about that.
std::string page_html(const PageDocument& document);

// Vega is the library that draws figures.

/// The message if vega_script() finds nothing.
inline constexpr std::string_view kNoVega =
    "the page has tables but no figures, because Vega was not found (Debian: install libjs-vega; "
    "elsewhere: set KVLAB_VEGA to its folder)";

/// One script with Vega's licence and its modules. Looks in the folder that the environment
/// variable KVLAB_VEGA names, otherwise in the Python package, otherwise in Debian's folder.
/// Returns nullopt if a module is missing.
std::optional<std::string> vega_script();

/// A file of sim/report/page/, by its name. Throws std::out_of_range if there is none.
std::string_view page_file(std::string_view name);

}  // namespace kvlab
