// MetricTable of points and lines, and of heads: as pages draw them, and as Vega-Lite for files.
#pragma once

#include <limits>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "sim/run/ranking.hpp"
#include "traces/base/files.hpp"

namespace kvlab {

// How each policy looks, in every figure: one colour, one dash, one marker.
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

struct FigureAxis {
  std::string title;
  bool logarithmic = false;
  int base = 10;                        ///< of a logarithmic axis: ticks are its powers
  std::vector<double> ticks = {};       ///< empty: chosen where the figure is drawn
  std::vector<std::string> names = {};  ///< of the places 0, 1, …, where they stand for no number
};

struct FigurePoint {
  double x, y;
  /// Of bars; NaN: none.
  double x_low = std::numeric_limits<double>::quiet_NaN(), x_high = x_low, y_low = x_low,
         y_high = x_low;
  std::string note = {};  ///< said of the point beside its numbers
};

struct FigureSeries {
  std::string label;
  SeriesStyle style;
  std::vector<FigurePoint> points;
};

struct Figure {
  std::string name;   ///< of a file, and of the element that a page has for it
  std::string title;  ///< with what it is of: policy, budget
  FigureAxis x, y;
  bool joined = true;  ///< by lines
  std::vector<FigureSeries> series;
};

/// A figure for each layer and KV head.
struct HeadGrid {
  std::vector<std::int32_t> layers;          ///< rows
  std::size_t heads = 0;                     ///< columns
  std::vector<std::optional<double>> cells;  ///< [layer, head]
};

/// `metric` against the budget, a line for each of `drawn` (indices); no series where none has it.
Figure curve_figure(const MetricTable& metric_table, const std::vector<std::size_t>& drawn,
                    const MetricInfo& metric);
/// `metric` against the bytes of keys and values, log-log, a line for each policy over its budgets:
/// a point at the mean over decoded queries, a bar to the peak, where the figures have those; else
/// at what was held in the end. No series where none has both.
Figure frontier_figure(const MetricTable& metric_table, const std::vector<std::size_t>& drawn,
                       const MetricInfo& metric);

/// Of `figure` what the page's scripts draw (sim/report/page/points.js).
nlohmann::ordered_json page_json(const Figure& figure);

/// One Vega-Lite specification that needs nothing else.
nlohmann::ordered_json vega_lite(const Figure& figure);
nlohmann::ordered_json vega_lite(const HeadGrid& grid, const std::string& title,
                                 std::string_view metric);

using NamedFigures = std::vector<std::pair<std::string, nlohmann::ordered_json>>;
/// Those that have series, as Vega-Lite.
NamedFigures vega_lites(const std::vector<Figure>& figures);

/// Writes each as NAME.vl.json into `folder`, and beside it NAME.svg and NAME.png (twice as fine)
/// where vl-convert is at hand: as a command, or as Python's module. Returns what is missing, empty
/// if nothing. Throws std::runtime_error: it refuses a specification.
std::string write_figures(const NamedFigures& figures, const AtomicFolder& folder);

}  // namespace kvlab
