#include "sim/report/interactive/vega.hpp"

#include <fmt/format.h>

#include <array>
#include <cstdlib>
#include <filesystem>

#include "sim/report/interactive/scripts.hpp"
#include "traces/base/files.hpp"

namespace kvlab {
namespace {

constexpr const char* kDebian = "/usr/share/javascript/vega";
constexpr std::size_t kMostBytes = std::size_t{1} << 20;

/// Each behind those that it asks for.
constexpr std::array<std::string_view, 20> kModules{
    "util",           "canvas",    "time",      "format",     "loader",
    "statistics",     "dataflow",  "scale",     "scenegraph", "expression",
    "event-selector", "selection", "functions", "runtime",    "interpreter",
    "parser",         "view",      "encode",    "transforms", "view-transforms"};

/// The module's text without the line that names its source map.
std::string module_script(const std::filesystem::path& file, std::string_view name) {
  std::string text = read_text_file(file.string(), kMostBytes);
  text.resize(std::min(text.find("//# sourceMappingURL="), text.size()));
  // vega-functions asks for vega-selection by another name.
  return fmt::format("vegaModule('vega-{}', function (exports, module, require) {{\n{}\n}});\n",
                     name == "selection" ? "selections" : name, text);
}

}  // namespace

std::optional<std::string> vega_script() {
  const char* const asked = std::getenv("KVLAB_VEGA");
  const std::filesystem::path folder = asked && *asked ? asked : kDebian;
  std::string script =
      fmt::format("/*\n{}*/\n{}", page_file("vega-licence.txt"), page_file("modules.js"));
  for (const std::string_view name : kModules) {
    const std::filesystem::path file = folder / fmt::format("vega-{}.min.js", name);
    if (!std::filesystem::is_regular_file(file)) return std::nullopt;
    script += module_script(file, name);
  }
  return script;
}

}  // namespace kvlab
