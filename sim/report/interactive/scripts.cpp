#include "sim/report/interactive/scripts.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <stdexcept>

#include "policies/embedded.hpp"
#include "traces/base/json.hpp"
#include "traces/base/text.hpp"

namespace kvlab {

std::span<const EmbeddedText> page_files();

namespace {

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
