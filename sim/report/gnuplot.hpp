// Charts are gnuplot's work: a script in, an SVG out.
#pragma once

#include <string>
#include <string_view>

namespace kvlab {

/// One figure: a script that sets neither terminal nor output, and its size in pixels.
struct Drawing {
  std::string script;
  int width = 0, height = 0;
};

/// Runs gnuplot (Debian: gnuplot-nox). `name` (letters, digits, _) begins the SVG's ids. Returns
/// the SVG. Throws std::runtime_error: gnuplot is not installed, or refuses the script.
std::string gnuplot_svg(const Drawing& drawing, std::string_view name);
/// The same as PNG, twice as fine.
std::string gnuplot_png(const Drawing& drawing, std::string_view name);

/// `text` as a gnuplot string: single quotes, in which nothing is expanded.
std::string gnuplot_string(std::string_view text);

}  // namespace kvlab
