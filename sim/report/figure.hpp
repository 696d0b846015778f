// Figures with points and lines, and figures with a cell for each head. Both exist as JSON that the
// scripts of a page draw, and as Vega-Lite for files.
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

// The following types describe the appearance of policies in figures: colour, dash and marker.
/// A colour of pages, with a second shade for dark mode.
struct PageColour {
  std::string_view name;   ///< name of the CSS variable without the dashes
  std::string_view light;  ///< #rrggbb
  std::string_view dark;
};
std::span<const PageColour> page_colours();
/// The light shade of a page colour. Throws std::out_of_range for an unknown name.
std::string_view light_of(std::string_view name);

struct SeriesStyle {
  std::string_view colour;  ///< name of a page colour
  std::vector<int> dash;    ///< pixels on and off; empty: a solid line
  std::string_view shape;   ///< shape of markers, in Vega's names; empty: none
  bool filled = true;
  bool operator==(const SeriesStyle&) const = default;
};
/// A style as the page's scripts read it: an object with `colour`, `dash`, `shape` and `filled`.
nlohmann::ordered_json style_json(const SeriesStyle& style);

/// The style of each series; all are different. A policy of the registry has the same colour on
/// every page. Series of one policy have the same colour and differ in dash and marker.
std::vector<SeriesStyle> styles_of(std::span<const Series> series);

struct FigureAxis {
  std::string title;
  bool logarithmic = false;
  int base = 10;                        ///< base of a logarithmic axis: ticks are its powers
  std::vector<double> ticks = {};       ///< empty: chosen when the figure is drawn
  std::vector<std::string> names = {};  ///< names of the positions 0, 1, …, instead of numbers
};

struct FigurePoint {
  double x, y;
  /// Ends of error bars; NaN: no bar.
  double x_low = std::numeric_limits<double>::quiet_NaN(), x_high = x_low, y_low = x_low,
         y_high = x_low;
  std::string note = {};  ///< text that is shown with the point's numbers
};

struct FigureSeries {
  std::string label;
  SeriesStyle style;
  std::vector<FigurePoint> points;
};

struct Figure {
  std::string name;   ///< used for files and for the element on the page
  std::string title;  ///< includes policy and budget
  FigureAxis x, y;
  bool joined = true;  ///< whether lines join the points
  std::vector<FigureSeries> series;
};

/// A value for each layer and KV head.
struct HeadGrid {
  std::vector<std::int32_t> layers;          ///< rows
  std::size_t heads = 0;                     ///< columns
  std::vector<std::optional<double>> cells;  ///< [layer, head]
};

/// `metric` against the budget, with one line for each of `drawn` (indices of series). The figure
/// is empty if no series has the metric.
Figure curve_figure(const MetricTable& metric_table, const std::vector<std::size_t>& drawn,
                    const MetricInfo& metric);
/// `metric` against the bytes of keys and values, with one line for each policy over its budgets. A
/// point is drawn at the mean bytes over decoded queries, or if the table lacks these, at the bytes
/// after the last token. If the peak is known, a bar extends to it. The figure is empty if no
/// series has both `metric` and bytes.
Figure frontier_figure(const MetricTable& metric_table, const std::vector<std::size_t>& drawn,
                       const MetricInfo& metric);

/// The figure as JSON, which the page's scripts draw (sim/report/page/points.js).
nlohmann::ordered_json page_json(const Figure& figure);
/// Adds the figures that are not empty to the data of a page.
void add_figures(nlohmann::ordered_json& data, const std::vector<Figure>& figures);

/// A self-contained Vega-Lite specification.
nlohmann::ordered_json vega_lite(const Figure& figure);
nlohmann::ordered_json vega_lite(const HeadGrid& grid, const std::string& title,
                                 std::string_view metric);

using NamedFigures = std::vector<std::pair<std::string, nlohmann::ordered_json>>;
/// The figures that are not empty, as Vega-Lite.
NamedFigures vega_lites(const std::vector<Figure>& figures);

/// Writes each figure as NAME.vl.json into `folder` and, if vl-convert is available (as a command
/// or as a Python module), also as NAME.svg and NAME.png (at double resolution). Returns a message
/// about files that could not be made; empty if all were made. Throws std::runtime_error if
/// vl-convert rejects a specification.
std::string write_figures(const NamedFigures& figures, const AtomicFolder& folder);

}  // namespace kvlab
