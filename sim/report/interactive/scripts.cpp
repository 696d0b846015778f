#include "sim/report/interactive/scripts.hpp"

#include <fmt/format.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>

#include "policies/embedded.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"
#include "traces/base/text.hpp"

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

constexpr std::array<std::string_view, 9> kScripts{"data.js",   "elements.js", "chart.js",
                                                   "curves.js", "heads.js",    "points.js",
                                                   "kept.js",   "tables.js",   "main.js"};

/// Inside <script> nothing but "</script" and "<!--" ends or bends it; in JSON "<" may be escaped.
std::string json_element(const nlohmann::ordered_json& data) {
  std::string text = json_text(data, -1);
  text = replace_all(text, "<", "\\u003c");
  return fmt::format("<script type=\"application/json\" id=\"data\">{}</script>\n", text);
}

std::string script_element(std::string text) {
  text = replace_all(text, "</script", "<\\/script");
  text = replace_all(text, "<!--", "<\\!--");
  return fmt::format("<script>\n{}</script>\n", text);
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

std::span<const EmbeddedText> page_files();

std::string_view page_file(std::string_view name) {
  for (const EmbeddedText& file : page_files())
    if (file.path.substr(file.path.rfind('/') + 1) == name) return file.text;
  throw std::out_of_range("sim/report/page holds no " + std::string(name));
}

std::string script_elements(const nlohmann::ordered_json& data, std::string_view vega) {
  std::string own = "(() => {\n'use strict';\n";
  for (const std::string_view name : kScripts) own += page_file(name);
  return json_element(data) + script_element(std::string(vega)) + script_element(own + "})();\n");
}

}  // namespace kvlab
