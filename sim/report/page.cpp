#include "sim/report/page.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <span>
#include <stdexcept>

#include "policies/embedded.hpp"
#include "sim/report/figure.hpp"
#include "sim/report/text.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"
#include "traces/base/process.hpp"
#include "traces/base/text.hpp"

namespace kvlab {
namespace {

constexpr const char* kDebian = "/usr/share/javascript/vega";
constexpr std::size_t kMaxBytes = std::size_t{1} << 20;

/// Vega's modules, in an order in which each module comes after those that it requires.
constexpr std::array<std::string_view, 20> kModules{
    "util",           "canvas",    "time",      "format",     "loader",
    "statistics",     "dataflow",  "scale",     "scenegraph", "expression",
    "event-selector", "selection", "functions", "runtime",    "interpreter",
    "parser",         "view",      "encode",    "transforms", "view-transforms"};

constexpr std::array<std::string_view, 19> kScripts{
    "text.js",     "data.js", "elements.js", "chart.js",   "curves.js", "heads.js", "axis.js",
    "points.js",   "kept.js", "tables.js",   "layout.js",  "replay.js", "eval.js",  "task.js",
    "fidelity.js", "tune.js", "plan.js",     "compare.js", "main.js"};

/// The folder of Vega: the one that KVLAB_VEGA names, otherwise the one in the Python package,
/// otherwise Debian's.
std::filesystem::path vega_folder() {
  const char* const requested = std::getenv("KVLAB_VEGA");
  if (requested && *requested) return requested;
  return installed_file("javascript/vega").value_or(kDebian);
}

/// Wraps the text of a module in a call of vegaModule() (modules.js), and removes the line that
/// names its source map.
std::string module_script(const std::filesystem::path& file, std::string_view name) {
  std::string text = read_text_file(file.string(), kMaxBytes);
  text.resize(std::min(text.find("//# sourceMappingURL="), text.size()));
  // vega-functions requires the module vega-selection by the name vega-selections.
  return fmt::format("vegaModule('vega-{}', function (exports, module, require) {{\n{}\n}});\n",
                     name == "selection" ? "selections" : name, text);
}

/// The data as an HTML element. Inside <script>, HTML treats "</script" and "<!--" specially, so
/// every "<" is escaped, which JSON allows.
std::string json_element(const nlohmann::ordered_json& data) {
  return fmt::format("<script type=\"application/json\" id=\"data\">{}</script>\n",
                     replace_all(json_text(data, -1), "<", "\\u003c"));
}

std::string script_element(std::string text) {
  text = replace_all(text, "</script", "<\\/script");
  text = replace_all(text, "<!--", "<\\!--");
  return fmt::format("<script>\n{}</script>\n", text);
}

/// CSS with the page's colours for light and dark mode.
std::string style_sheet() {
  std::string light = "--page:#fff;", dark = "--page:#15181b;";
  for (const PageColour& colour : page_colours()) {
    light += fmt::format("--{}:{};", colour.name, colour.light);
    dark += fmt::format("--{}:{};", colour.name, colour.dark);
  }
  // A theme that the reader has chosen (data-theme) takes precedence over the system's setting.
  return fmt::format(
      ":root{{{0}}}\n@media (prefers-color-scheme: dark){{:root{{{1}}}}}\n"
      ":root[data-theme=\"light\"]{{{0}}}\n:root[data-theme=\"dark\"]{{{1}}}\n{2}",
      light, dark, page_file("page.css"));
}

/// The text that a reader sees if scripts do not run.
std::string no_script(const std::string& text) {
  return fmt::format(
      "<noscript><p>JavaScript draws this page, but it is turned off.</p>\n<pre>{}</pre>"
      "</noscript>\n",
      escape(text));
}

}  // namespace

std::optional<std::string> vega_script() {
  const std::filesystem::path folder = vega_folder();
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
  throw std::out_of_range("sim/report/page has no file " + std::string(name));
}

std::string page_html(const PageDocument& document) {
  nlohmann::ordered_json data = document.data;
  const auto vega = vega_script();
  if (!vega) data["without_figures"] = kNoVega;
  std::string scripts = "(() => {\n'use strict';\n";
  for (const std::string_view name : kScripts) scripts += page_file(name);
  // The content security policy forbids all network requests.
  return fmt::format(
      "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; "
      "style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:\">\n"
      "<title>kvlab</title>\n<style>{}</style>\n</head>\n<body>\n<main>\n{}</main>\n{}{}{}</body>\n"
      "</html>\n",
      style_sheet(), no_script(document.text), json_element(data),
      vega ? script_element(*vega) : "", script_element(scripts + "})();\n"));
}

}  // namespace kvlab
