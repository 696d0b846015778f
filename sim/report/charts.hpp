// The report's figures, as SVG to stand inside HTML.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "sim/report/gnuplot.hpp"
#include "sim/report/palette.hpp"
#include "sim/run/ranking.hpp"
#include "sim/run/run.hpp"

namespace kvlab {

/// A metric against the budget: one line for each of `series` (indices) with bars of one standard
/// error. The budget's axis is logarithmic.
std::string curve_chart(const Figures& figures, const std::vector<SeriesStyle>& styles,
                        const std::vector<std::size_t>& series, const MetricInfo& metric,
                        std::string_view name);
/// The same as it is drawn, with its own colours. Nothing where no series has the metric.
std::optional<Drawing> curve_drawing(const Figures& figures, const std::vector<SeriesStyle>& styles,
                                     const std::vector<std::size_t>& series,
                                     const MetricInfo& metric);

/// One point of a scatter.
struct ScatterPoint {
  double x, y;
  SeriesStyle style;
};
/// Points on logarithmic axes. Points that are not positive are left out; empty where none is left.
std::string scatter_chart(const std::vector<ScatterPoint>& points, std::string_view x_label,
                          std::string_view y_label, std::string_view name);

/// A figure for each layer and KV head.
struct HeadGrid {
  std::vector<std::int32_t> layers;          ///< rows
  std::size_t heads = 0;                     ///< columns
  std::vector<std::optional<double>> cells;  ///< [layer, head]
};

enum class Shading {
  amount,     ///< from 0 up: the darker the more
  difference  ///< around 0: blue below, orange above
};
std::string heat_map(const HeadGrid& grid, Shading shading, std::string_view label,
                     std::string_view name);
Drawing heat_drawing(const HeadGrid& grid, Shading shading);

/// What a head kept: a line for each token, from the first query that spanned it to the last.
std::string lifetime_chart(const Kept& kept, const KeptSeries& series, std::string_view colour,
                           std::string_view label, std::string_view name);

}  // namespace kvlab
