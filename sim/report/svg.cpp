#include "sim/report/svg.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <stdexcept>

#include "sim/report/html.hpp"
#include "sim/report/palette.hpp"
#include "traces/base/text.hpp"

namespace kvlab {
namespace {

constexpr auto kNowhere = std::string_view::npos;

/// Drops everything from each `first` to the `last` that follows it.
void drop_elements(std::string& text, std::string_view first, std::string_view last) {
  for (std::size_t at = 0; (at = text.find(first, at)) != kNowhere;) {
    const std::size_t end = text.find(last, at);
    if (end == kNowhere) return;
    text.erase(at, end + last.size() - at);
  }
}

/// `<g …> </g>` draws nothing, and gnuplot writes many.
std::string without_empty_groups(std::string_view svg) {
  std::string text;
  while (!svg.empty()) {
    const std::size_t group = std::min(svg.find("<g "), svg.size());
    text += svg.substr(0, group);
    svg.remove_prefix(group);
    const std::size_t inside = svg.find('>'), after = svg.find_first_not_of(" \n\t", inside + 1);
    if (inside == kNowhere || after == kNowhere) break;
    const bool is_empty = svg.substr(after).starts_with("</g>");
    if (!is_empty) text += svg.substr(0, after);
    svg.remove_prefix(is_empty ? after + 4 : after);
  }
  return text.append(svg);
}

/// `  0,  99, 168` as `#0063a8`; nothing if it is something else.
std::optional<std::string> hex_colour(std::string_view numbers) {
  std::string hex = "#";
  const char* at = numbers.data();
  const char* const end = at + numbers.size();
  for (int i = 0; i < 3; ++i) {
    while (at != end && (*at == ' ' || *at == ',')) ++at;
    unsigned char value = 0;
    const auto [next, error] = std::from_chars(at, end, value);
    if (error != std::errc{}) return std::nullopt;
    hex += fmt::format("{:02x}", value);
    at = next;
  }
  return hex;
}

/// gnuplot writes colours as `rgb(  0,  99, 168)`; page colours become variables.
std::string themed(std::string_view svg) {
  constexpr std::string_view kOpen = "rgb(";
  std::string text;
  for (std::size_t at; (at = svg.find(kOpen)) != kNowhere;) {
    const std::size_t close = svg.find(')', at);
    if (close == kNowhere) break;
    const auto hex = hex_colour(svg.substr(at + kOpen.size(), close - at - kOpen.size()));
    text += svg.substr(0, at);
    std::string colour = hex.value_or("currentColor");
    for (const PageColour& page : page_colours())
      if (page.light == hex) colour = fmt::format("var(--{})", page.name);
    text += colour;
    svg.remove_prefix(close + 1);
  }
  return text.append(svg);
}

}  // namespace

std::string inline_svg(std::string_view svg, std::string_view name, std::string_view label) {
  const std::size_t open = svg.find("<svg"), open_end = svg.find('>', open),
                    close = svg.rfind("</svg>");
  const std::size_t box = svg.find("viewBox=\""), box_end = svg.find('"', box + 9);
  if (close == kNowhere || open_end == kNowhere || box > open_end || close < open_end)
    throw std::runtime_error("gnuplot wrote something else than an SVG with a viewBox");
  const std::string_view view = svg.substr(box + 9, box_end - box - 9);

  std::string body(svg.substr(open_end + 1, close - open_end - 1));
  drop_elements(body, "<title>", "</title>");
  drop_elements(body, "<desc>", "</desc>");
  drop_elements(body, "<filter", "</filter>");
  body = themed(without_empty_groups(body));
  for (const char quote : {'\'', '"'})
    for (const std::string_view attribute : {"color", "fill", "stroke"})
      body = replace_all(body, fmt::format(" {}={}black{}", attribute, quote, quote),
                         fmt::format(" {}={}{}{}", attribute, quote,
                                     attribute == "color" ? "inherit" : "currentColor", quote));
  // Ids are the page's, and every figure brings the same markers.
  body = replace_all(body, "id='gp", fmt::format("id='{}-gp", name));
  body = replace_all(body, "href='#gp", fmt::format("href='#{}-gp", name));
  body = replace_all(body, "id=\"gnuplot_canvas\"", "");
  body = replace_all(body, "font-family=\"sans-serif\"", "");
  body = replace_all(body, "xlink:href", "href");
  return fmt::format("<svg viewBox=\"{}\" role=\"img\" aria-label=\"{}\">{}</svg>", escape(view),
                     escape(label), body);
}

}  // namespace kvlab
