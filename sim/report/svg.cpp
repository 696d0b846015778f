#include "sim/report/svg.hpp"

#include <fmt/format.h>

#include <charconv>
#include <optional>
#include <regex>
#include <stdexcept>

#include "sim/report/html.hpp"
#include "sim/report/palette.hpp"

namespace kvlab {
namespace {

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
    text.replace(at, from.size(), to);
}

/// gnuplot writes colours as `rgb(  0,  99, 168)`; page colours become variables.
std::string themed(const std::string& svg) {
  static const std::regex kRgb(R"(rgb\( *(\d+), *(\d+), *(\d+)\))");
  std::string text;
  auto copied = svg.cbegin();
  for (std::sregex_iterator match(svg.begin(), svg.end(), kRgb), end; match != end; ++match) {
    const std::string hex = fmt::format("#{:02x}{:02x}{:02x}", std::stoi((*match)[1]),
                                        std::stoi((*match)[2]), std::stoi((*match)[3]));
    text.append(copied, (*match)[0].first);
    std::string colour = hex;
    for (const PageColour& page : page_colours())
      if (page.light == hex) colour = fmt::format("var(--{})", page.name);
    text += colour;
    copied = (*match)[0].second;
  }
  return text.append(copied, svg.cend());
}

}  // namespace

std::string inline_svg(std::string_view svg, std::string_view name, std::string_view label) {
  const std::size_t open = svg.find("<svg"), open_end = svg.find('>', open),
                    close = svg.rfind("</svg>");
  const std::size_t box = svg.find("viewBox=\""), box_end = svg.find('"', box + 9);
  if (close == std::string_view::npos || open_end == std::string_view::npos || box > open_end)
    throw std::runtime_error("gnuplot wrote something else than an SVG with a viewBox");
  const std::string_view view = svg.substr(box + 9, box_end - box - 9);

  static const std::regex kNames("<title>[^<]*</title>|<desc>[^<]*</desc>");
  static const std::regex kEmptyGroup("<g [^>]*>\\s*</g>\\s*");
  static const std::regex kFilters("<filter[^]*?</filter>\\s*");
  std::string body(svg.substr(open_end + 1, close - open_end - 1));
  body = std::regex_replace(body, kNames, "");
  body = std::regex_replace(body, kFilters, "");
  body = std::regex_replace(body, kEmptyGroup, "");
  body = themed(body);
  for (const char quote : {'\'', '"'})
    for (const std::string_view attribute : {"color", "fill", "stroke"})
      replace_all(body, fmt::format(" {}={}black{}", attribute, quote, quote),
                  fmt::format(" {}={}{}{}", attribute, quote,
                              attribute == "color" ? "inherit" : "currentColor", quote));
  // Ids are the page's, and every figure brings the same markers.
  replace_all(body, "id='gp", fmt::format("id='{}-gp", name));
  replace_all(body, "href='#gp", fmt::format("href='#{}-gp", name));
  replace_all(body, "id=\"gnuplot_canvas\"", "");
  replace_all(body, "font-family=\"sans-serif\"", "");
  replace_all(body, "xlink:href", "href");
  return fmt::format("<svg viewBox=\"{}\" role=\"img\" aria-label=\"{}\">{}</svg>", escape(view),
                     escape(label), body);
}

}  // namespace kvlab
