// How each policy looks, in every figure: one colour, one dash, one marker.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sim/run/ranking.hpp"

namespace kvlab {

/// A colour of the page, safe for the colour-blind. On a dark page another shade of it stands in.
struct PageColour {
  std::string_view name;   ///< of the CSS variable, without the dashes
  std::string_view light;  ///< #rrggbb: what gnuplot draws with
  std::string_view dark;
};
std::span<const PageColour> page_colours();
/// The `light` of a page colour. Throws std::out_of_range if there is none of that name.
std::string_view light_of(std::string_view name);

struct SeriesStyle {
  std::string_view colour;  ///< name of a page colour
  int dash;                 ///< gnuplot dash type
  int point;                ///< gnuplot point type; 0: none
};

/// By series. Series of one policy share its colour and differ in dash and marker.
std::vector<SeriesStyle> styles_of(std::span<const Series> series);

}  // namespace kvlab
