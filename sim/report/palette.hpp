// How each policy looks, in every figure: one colour, one dash, one marker.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string_view>
#include <vector>

#include "sim/run/ranking.hpp"

namespace kvlab {

/// A colour of the page. On a dark page another shade of it stands in.
struct PageColour {
  std::string_view name;   ///< of the CSS variable, without the dashes
  std::string_view light;  ///< #rrggbb
  std::string_view dark;
};
std::span<const PageColour> page_colours();
/// The `light` of a page colour. Throws std::out_of_range if there is none of that name.
std::string_view light_of(std::string_view name);

struct SeriesStyle {
  std::string_view colour;  ///< name of a page colour
  std::vector<int> dash;    ///< pixels drawn and left out; empty: a whole line
  std::string_view shape;   ///< of markers, as Vega names it; empty: none
  bool filled = true;
  bool operator==(const SeriesStyle&) const = default;
};
/// `colour`, `dash`, `shape`, `filled`: as the page's scripts read them.
nlohmann::ordered_json style_json(const SeriesStyle& style);

/// By series, no two alike. A policy of the shelf has its own colour on every page; series of one
/// policy share it and differ in dash and marker.
std::vector<SeriesStyle> styles_of(std::span<const Series> series);

}  // namespace kvlab
