// Makes gnuplot's SVG at home in a page: colours that follow the theme, ids of its own, no dead
// weight.
#pragma once

#include <string>
#include <string_view>

namespace kvlab {

/// `svg` as an element to stand inside HTML. Page colours become CSS variables; black becomes the
/// text's colour. `label` is what a screen reader says.
std::string inline_svg(std::string_view svg, std::string_view name, std::string_view label);

}  // namespace kvlab
