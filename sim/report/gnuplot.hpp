// Charts are gnuplot's work: a script in, an SVG out.
#pragma once

#include <string>
#include <string_view>

namespace kvlab {

/// Runs gnuplot (Debian: gnuplot-nox) on `script`, which draws one figure of the given size in
/// pixels and sets neither terminal nor output. `name` (letters, digits, _) begins the SVG's ids.
/// Returns the SVG. Throws std::runtime_error: gnuplot is not installed, or refuses the script.
std::string gnuplot_svg(std::string_view script, int width, int height, std::string_view name);

/// `text` as a gnuplot string: single quotes, in which nothing is expanded.
std::string gnuplot_string(std::string_view text);

}  // namespace kvlab
