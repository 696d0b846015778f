#include "sim/report/charts.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "sim/report/svg.hpp"

namespace kvlab {
namespace {

constexpr int kWide = 520, kNarrow = 400;
constexpr std::size_t kMostLifelines = 2000;
constexpr std::size_t kMostLabelledCells = 96;

/// What all figures share: thin axes, quiet grid.
std::string frame() {
  return fmt::format(
      "set minussign\nset border 3 lw 1 lc rgb '{0}'\n"
      "set tics nomirror out scale 0.6 textcolor rgb '{1}'\n"
      "set grid ytics lt 1 lw 1 lc rgb '{2}'\n"
      "set xlabel textcolor rgb '{1}'\nset ylabel textcolor rgb '{1}'\n"
      "set key textcolor rgb '{3}'\n",
      light_of("muted"), light_of("muted"), light_of("rule"), light_of("ink"));
}

/// A figure's size and the room around its plot, in pixels.
struct Layout {
  int width, height, left, right, top, bottom;

  double x(int pixels) const { return pixels / static_cast<double>(width); }
  double y(int pixels) const { return pixels / static_cast<double>(height); }
  std::string margins() const {
    return fmt::format(
        "set lmargin at screen {}\nset rmargin at screen {}\nset tmargin at screen {}\n"
        "set bmargin at screen {}\n",
        x(left), 1 - x(right), 1 - y(top), y(bottom));
  }
};

double mean_tokens(const BudgetColumn& budget) {
  return (static_cast<double>(budget.least_tokens) + budget.most_tokens) / 2;
}

/// How many columns of the key fit a wide figure.
int key_columns(const Figures& figures, const std::vector<std::size_t>& series) {
  constexpr double kLetter = 7.7, kSample = 62;  // pixels
  std::size_t longest = 0;
  for (const std::size_t s : series) longest = std::max(longest, figures.series()[s].label.size());
  return std::clamp(static_cast<int>(kWide / (kLetter * static_cast<double>(longest) + kSample)), 1,
                    3);
}

/// Labels at the budgets, as many as stand apart on a logarithmic axis.
std::string budget_tics(const std::vector<BudgetColumn>& budgets) {
  const double span = std::log2(mean_tokens(budgets.back()) / mean_tokens(budgets.front()));
  const double apart = span / 10;
  std::string tics;
  double last = -1e9;
  for (const BudgetColumn& budget : budgets) {
    const double at = mean_tokens(budget), place = std::log2(at);
    if (place - last < apart) continue;
    last = place;
    tics += fmt::format("{}'{:.0f}' {}", tics.empty() ? "" : ", ", at, at);
  }
  return tics;
}

/// One series as a data block: tokens, mean, standard error.
std::string curve_block(const Figures& figures, std::size_t series, std::string_view metric) {
  std::string block;
  for (const BudgetColumn& budget : figures.budgets()) {
    const auto average = figures.average(series, budget.text, metric);
    if (!average) continue;
    const double error = std::isnan(average->standard_error) ? 0 : average->standard_error;
    block += fmt::format("{} {} {}\n", mean_tokens(budget), average->mean, error);
  }
  return block;
}

std::string curve_plot(const SeriesStyle& style, std::string_view label, std::size_t block) {
  const std::string line = fmt::format("lc rgb '{}' dt {} lw {}", light_of(style.colour),
                                       style.dash, style.point ? 2 : 1.6);
  const std::string title = gnuplot_string(label);
  if (!style.point) return fmt::format("$d{} using 1:2 with lines {} title {}", block, line, title);
  return fmt::format(
      "$d{0} using 1:($2-$3):(0):(2*$3) with vectors nohead lc rgb '{1}' dt 1 lw 1.2 notitle, "
      "$d{0} using 1:2 with linespoints {2} pt {3} ps 0.75 title {4}",
      block, light_of(style.colour), line, style.point, title);
}

/// Black or white, whichever reads better on a cell `place` of the way up its palette.
const char* ink_on(Shading shading, double place) {
  const bool dark_cell = shading == Shading::amount ? place > 0.65 : place < 0.15 || place > 0.85;
  return dark_cell ? "#ffffff" : "#101214";
}

struct Range {
  double least, most;
};

/// The next round number: 1, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, …
double rounded_up(double value) {
  const double power = std::pow(10, std::floor(std::log10(value)));
  for (const double digit : {1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0})
    if (value <= digit * power) return digit * power;
  return 10 * power;
}

Range range_of(const HeadGrid& grid, Shading shading) {
  double most = 0;
  for (const auto& cell : grid.cells)
    if (cell) most = std::max(most, std::abs(*cell));
  const double most_shown = most > 0 ? rounded_up(most) : 1;
  return {shading == Shading::difference ? -most_shown : 0, most_shown};
}

std::string cell_block(const HeadGrid& grid) {
  std::string block = "$cells << EOD\n";
  for (std::size_t l = 0; l < grid.layers.size(); ++l)
    for (std::size_t h = 0; h < grid.heads; ++h)
      if (const auto& cell = grid.cells[l * grid.heads + h])
        block += fmt::format("{} {} {} {} {} {} {}\n", h, l, static_cast<double>(h) - 0.48,
                             static_cast<double>(h) + 0.48, static_cast<double>(l) - 0.46,
                             static_cast<double>(l) + 0.46, *cell);
  return block + "EOD\n";
}

std::string cell_text(double value, double most) {
  const int decimals = most >= 10 ? 1 : most >= 0.1 ? 2 : 3;
  const std::string digits = fmt::format("{:.{}f}", std::abs(value), decimals);
  const bool is_zero = digits.find_first_not_of("0.") == std::string::npos;
  return value < 0 && !is_zero ? "−" + digits : digits;
}

/// The figures inside the cells, in the ink that reads on each.
std::string cell_labels(const HeadGrid& grid, Shading shading, Range range) {
  std::string script;
  for (std::size_t l = 0; l < grid.layers.size(); ++l)
    for (std::size_t h = 0; h < grid.heads; ++h) {
      const auto& cell = grid.cells[l * grid.heads + h];
      if (!cell) continue;
      const double place = (*cell - range.least) / (range.most - range.least);
      script += fmt::format("set label '{}' at {},{} center textcolor rgb '{}' front\n",
                            cell_text(*cell, range.most), h, l, ink_on(shading, place));
    }
  return script;
}

std::string layer_tics(const HeadGrid& grid) {
  const std::size_t every = std::max<std::size_t>(1, (grid.layers.size() + 15) / 16);
  std::string tics;
  for (std::size_t l = 0; l < grid.layers.size(); l += every)
    tics += fmt::format("{}'{}' {}", l ? ", " : "", grid.layers[l], l);
  return tics;
}

/// Labels at 1, 2 and 5 times the powers of ten between two positive numbers.
std::string log_tics(double low, double high) {
  std::string tics;
  for (double power = std::pow(10, std::floor(std::log10(low))); power <= high; power *= 10)
    for (const double digit : {1.0, 2.0, 5.0})
      if (const double at = digit * power; at >= low && at <= high)
        tics += fmt::format("{}'{:g}' {:g}", tics.empty() ? "" : ", ", at, at);
  return tics;
}

}  // namespace

std::optional<Drawing> curve_drawing(const Figures& figures, const std::vector<SeriesStyle>& styles,
                                     const std::vector<std::size_t>& series,
                                     const MetricInfo& metric) {
  std::string blocks, plots;
  std::size_t drawn = 0;
  for (const std::size_t s : series) {
    const std::string block = curve_block(figures, s, metric.name);
    if (block.empty()) continue;
    blocks += fmt::format("$d{} << EOD\n{}EOD\n", drawn, block);
    plots += (drawn ? ", \\\n  " : "") + curve_plot(styles[s], figures.series()[s].label, drawn);
    ++drawn;
  }
  if (drawn == 0) return std::nullopt;
  const auto& budgets = figures.budgets();
  constexpr int kKeyRow = 25, kAxis = 66;
  const int columns = key_columns(figures, series);
  const int key_rows = (static_cast<int>(drawn) + columns - 1) / columns;
  const int key = kKeyRow * key_rows + 12;
  constexpr int kPlot = 300;
  // gnuplot limits the rows of a vertical key, and is shy of columns in a horizontal one.
  const std::string shape = columns > 2 ? fmt::format("vertical maxrows {}", key_rows)
                                        : fmt::format("horizontal maxcols {}", columns);
  const Layout layout{.width = kWide,
                      .height = kPlot + kAxis + key,
                      .left = 54,
                      .right = 12,
                      .top = 12,
                      .bottom = kAxis + key};
  const std::string script =
      frame() + blocks + layout.margins() +
      fmt::format(
          "set key at screen 0.5,{} center top {} Left reverse samplen 2 spacing 1.25 "
          "width -1 font ',14'\n"
          "set logscale x 2\nset xrange [{}:{}]\nset xtics ({})\n"
          "set xlabel 'budget, tokens' offset 0,0.4\nset yrange {}\nset bars 0\nplot {}\n",
          layout.y(key), shape, mean_tokens(budgets.front()) / 1.12,
          mean_tokens(budgets.back()) * 1.12, budget_tics(budgets),
          metric.higher_is_better ? "[:1]" : "[0:]", plots);
  return Drawing{script, layout.width, layout.height};
}

std::string curve_chart(const Figures& figures, const std::vector<SeriesStyle>& styles,
                        const std::vector<std::size_t>& series, const MetricInfo& metric,
                        std::string_view name) {
  const auto drawing = curve_drawing(figures, styles, series, metric);
  if (!drawing) return "";
  return inline_svg(gnuplot_svg(*drawing, name), name,
                    fmt::format("{} against the budget", metric.label));
}

std::string scatter_chart(const std::vector<ScatterPoint>& points, std::string_view x_label,
                          std::string_view y_label, std::string_view name) {
  constexpr double kRoom = 1.25;  // beyond the outermost points
  std::string blocks, plots;
  std::size_t drawn = 0;
  double left = 0, right = 0, low = 0, high = 0;
  for (const ScatterPoint& point : points) {
    if (!(point.x > 0 && point.y > 0)) continue;
    blocks += fmt::format("$p{} << EOD\n{} {}\nEOD\n", drawn, point.x, point.y);
    plots += fmt::format("{}$p{} using 1:2 with points pt {} ps 1 lw 1.6 lc rgb '{}' notitle",
                         drawn ? ", \\\n  " : "", drawn, std::max(point.style.point, 1),
                         light_of(point.style.colour));
    left = drawn ? std::min(left, point.x) : point.x, right = std::max(right, point.x);
    low = drawn ? std::min(low, point.y) : point.y, high = std::max(high, point.y);
    ++drawn;
  }
  if (drawn == 0) return "";
  const Layout layout{
      .width = kNarrow, .height = 320, .left = 92, .right = 20, .top = 12, .bottom = 66};
  const std::string script =
      frame() + blocks + layout.margins() +
      fmt::format(
          "unset key\nset logscale xy\nset xrange [{}:{}]\nset yrange [{}:{}]\n"
          "set xtics ({})\nset ytics ({})\n"
          "set xlabel {} offset 0,0.4\nset ylabel {} offset 1.2,0\nplot {}\n",
          left / kRoom, right * kRoom, low / kRoom, high * kRoom,
          log_tics(left / kRoom, right * kRoom), log_tics(low / kRoom, high * kRoom),
          gnuplot_string(x_label), gnuplot_string(y_label), plots);
  return inline_svg(gnuplot_svg({script, layout.width, layout.height}, name), name,
                    fmt::format("{} against {}", y_label, x_label));
}

Drawing heat_drawing(const HeadGrid& grid, Shading shading) {
  const Range range = range_of(grid, shading);
  const char* palette =
      shading == Shading::amount
          ? "0 '#f4f1e6', 0.25 '#a9d6c5', 0.5 '#4fa3b8', 0.75 '#2a6496', 1 '#1d2f63'"
          : "0 '#0b4f8a', 0.25 '#6fb0dc', 0.5 '#f2f2ef', 0.75 '#f0a661', 1 '#a84300'";
  const int rows = static_cast<int>(grid.layers.size());
  constexpr int kBelow = 112, kBar = 44;
  const Layout layout{.width = kWide,
                      .height = kBelow + 12 + std::clamp(rows * 44, 150, 480),
                      .left = 62,
                      .right = 12,
                      .top = 12,
                      .bottom = kBelow};
  std::string script = frame() + cell_block(grid) + layout.margins();
  if (grid.cells.size() <= kMostLabelledCells && grid.heads <= 9)
    script += cell_labels(grid, shading, range);
  script += fmt::format(
      "unset grid\nunset key\nset border 0\nset tics scale 0\nset palette defined ({})\n"
      "set cbrange [{}:{}]\nset colorbox horizontal user origin screen 0.3,{} size screen 0.5,{}\n"
      "set cbtics {} offset 0,0.3\nset xrange [-0.5:{}-0.5]\nset yrange [{}-0.5:-0.5]\n"
      "set xtics {}\nset ytics ({})\nset xlabel 'KV head' offset 0,0.5\nset ylabel 'layer'\n"
      "set style fill solid noborder\n"
      "plot $cells using 1:2:3:4:5:6:7 with boxxyerror fillcolor palette\n",
      palette, range.least, range.most, layout.y(kBar - 14), layout.y(12),
      (range.most - range.least) / 4, grid.heads, rows, 1 + grid.heads / 16, layer_tics(grid));
  return {script, layout.width, layout.height};
}

std::string heat_map(const HeadGrid& grid, Shading shading, std::string_view label,
                     std::string_view name) {
  return inline_svg(gnuplot_svg(heat_drawing(grid, shading), name), name, label);
}

std::string lifetime_chart(const Kept& kept, const KeptSeries& series, std::string_view colour,
                           std::string_view label, std::string_view name) {
  // Long sequences: every n-th position stands for its neighbours.
  const std::uint32_t last = kept.queries.back();
  const std::size_t every = 1 + last / kMostLifelines;
  const double step = kept.queries.size() > 1 ? static_cast<double>(last - kept.queries.front()) /
                                                    static_cast<double>(kept.queries.size() - 1)
                                              : 1;
  std::string block = "$lives << EOD\n";
  for (const Lifetime& life : series.lifetimes)
    if (life.position % every == 0)
      block += fmt::format("{} {} {}\n", life.first_query, life.position,
                           life.last_query - life.first_query + step);
  block += "EOD\n";
  const Layout layout{
      .width = kNarrow, .height = 320, .left = 88, .right = 20, .top = 12, .bottom = 66};
  const double line = std::clamp(240.0 * static_cast<double>(every) / (last + 1), 1.1, 3.0);
  const std::string script =
      frame() + block + layout.margins() +
      fmt::format(
          "unset key\nunset grid\nset xrange [{}:{}]\nset yrange [{}:{}]\n"
          "set xtics {}\nset xlabel 'query position' offset 0,0.4\n"
          "set ylabel 'token position' offset 1.2,0\n"
          "plot $lives using 1:2:3:(0) with vectors nohead lw {} lc rgb '{}'\n",
          kept.queries.front(), last + step, -0.02 * last, 1.01 * last + 1,
          rounded_up((last + step - kept.queries.front()) / 5.0), line, light_of(colour));
  return inline_svg(gnuplot_svg({script, layout.width, layout.height}, name), name, label);
}

}  // namespace kvlab
