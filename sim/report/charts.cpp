#include "sim/report/charts.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "sim/report/gnuplot.hpp"
#include "sim/report/svg.hpp"

namespace kvlab {
namespace {

constexpr int kWidth = 560;
constexpr std::size_t kMostLifelines = 2000;
constexpr std::size_t kMostLabelledCells = 96;

/// What all figures share: thin axes, quiet grid.
std::string frame() {
  return fmt::format(
      "set border 3 lw 1 lc rgb '{0}'\n"
      "set tics nomirror out scale 0.6 textcolor rgb '{1}'\n"
      "set grid ytics lt 1 lw 1 lc rgb '{2}'\n"
      "set xlabel textcolor rgb '{1}'\nset ylabel textcolor rgb '{1}'\n"
      "set key textcolor rgb '{3}'\n",
      light_of("muted"), light_of("muted"), light_of("rule"), light_of("ink"));
}

double mean_tokens(const BudgetColumn& budget) {
  return (static_cast<double>(budget.least_tokens) + budget.most_tokens) / 2;
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
      "$d{0} using 1:2:3 with yerrorbars lc rgb '{1}' lw 1.2 pt -1 notitle, "
      "$d{0} using 1:2 with linespoints {2} pt {3} ps 0.75 title {4}",
      block, light_of(style.colour), line, style.point, title);
}

/// Black or white, whichever reads better on a grey of this lightness.
const char* ink_on(double lightness) { return lightness > 0.55 ? "#101214" : "#ffffff"; }

struct Range {
  double least, most;
};

Range range_of(const HeadGrid& grid, Shading shading) {
  double least = 0, most = 0;
  for (const auto& cell : grid.cells) {
    if (!cell) continue;
    least = std::min(least, *cell);
    most = std::max(most, *cell);
  }
  if (shading == Shading::difference) {
    most = std::max(most, -least);
    least = -most;
  }
  if (most <= least) most = least + 1;
  return {least, most};
}

std::string cell_blocks(const HeadGrid& grid) {
  std::string block = "$cells << EOD\n";
  for (std::size_t l = 0; l < grid.layers.size(); ++l)
    for (std::size_t h = 0; h < grid.heads; ++h)
      if (const auto& cell = grid.cells[l * grid.heads + h])
        block += fmt::format("{} {} {} {} {} {} {}\n", h, l, static_cast<double>(h) - 0.48,
                             static_cast<double>(h) + 0.48, static_cast<double>(l) - 0.46,
                             static_cast<double>(l) + 0.46, *cell);
  return block + "EOD\n";
}

/// The figures inside the cells, in the ink that reads on each.
std::string cell_labels(const HeadGrid& grid, Shading shading, Range range) {
  std::string script;
  for (std::size_t l = 0; l < grid.layers.size(); ++l)
    for (std::size_t h = 0; h < grid.heads; ++h) {
      const auto& cell = grid.cells[l * grid.heads + h];
      if (!cell) continue;
      const double place = (*cell - range.least) / (range.most - range.least);
      const double lightness =
          shading == Shading::amount ? 1 - place : 1 - 1.6 * std::abs(place - 0.5);
      script += fmt::format("set label '{:.{}f}' at {},{} center textcolor rgb '{}' front\n", *cell,
                            range.most >= 10    ? 1
                            : range.most >= 0.1 ? 2
                                                : 3,
                            h, l, ink_on(lightness));
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

}  // namespace

std::string curve_chart(const Figures& figures, const std::vector<SeriesStyle>& styles,
                        const std::vector<std::size_t>& series, const MetricInfo& metric,
                        std::string_view name) {
  std::string blocks, plots;
  std::size_t drawn = 0;
  for (const std::size_t s : series) {
    const std::string block = curve_block(figures, s, metric.name);
    if (block.empty()) continue;
    blocks += fmt::format("$d{} << EOD\n{}EOD\n", drawn, block);
    plots += (drawn ? ", \\\n  " : "") + curve_plot(styles[s], figures.series()[s].label, drawn);
    ++drawn;
  }
  if (drawn == 0) return "";
  const auto& budgets = figures.budgets();
  const int key_rows = static_cast<int>((drawn + 2) / 3);
  const int height = 350 + 22 * key_rows;
  const std::string script =
      frame() + blocks +
      fmt::format(
          "set key bmargin center horizontal samplen 3 spacing 1.15 width 1 maxrows {} font ',15'\n"
          "set logscale x 2\nset xrange [{}:{}]\nset xtics ({})\nset xlabel 'budget, tokens'\n"
          "set yrange {}\nset lmargin 7\nset rmargin 2\nset tmargin 1\nset bars 0\n"
          "plot {}\n",
          key_rows, mean_tokens(budgets.front()) / 1.12, mean_tokens(budgets.back()) * 1.12,
          budget_tics(budgets), metric.higher_is_better ? "[:1]" : "[0:]", plots);
  return inline_svg(gnuplot_svg(script, kWidth, height, name), name,
                    fmt::format("{} against the budget", metric.label));
}

std::string heat_map(const HeadGrid& grid, Shading shading, std::string_view label,
                     std::string_view name) {
  const Range range = range_of(grid, shading);
  const char* palette =
      shading == Shading::amount
          ? "0 '#f4f1e6', 0.25 '#a9d6c5', 0.5 '#4fa3b8', 0.75 '#2a6496', 1 '#1d2f63'"
          : "0 '#0b4f8a', 0.25 '#6fb0dc', 0.5 '#f2f2ef', 0.75 '#f0a661', 1 '#a84300'";
  const int rows = static_cast<int>(grid.layers.size());
  const int height = 130 + std::clamp(rows * 44, 150, 480);
  std::string script = frame() + cell_blocks(grid);
  if (grid.cells.size() <= kMostLabelledCells && grid.heads <= 9)
    script += cell_labels(grid, shading, range);
  script += fmt::format(
      "unset grid\nunset key\nset border 0\nset tics scale 0\nset palette defined ({})\n"
      "set cbrange [{}:{}]\nset colorbox horizontal user origin screen 0.3,0.06 size screen "
      "0.55,0.03\n"
      "set cbtics scale 0.4 autofreq\nset xrange [-0.5:{}-0.5]\nset yrange [{}-0.5:-0.5]\nset "
      "xtics 1\n"
      "set ytics ({})\nset xlabel 'KV head'\nset ylabel 'layer'\nset bmargin screen 0.32\nset "
      "tmargin 1\n"
      "set rmargin 2\nset lmargin 8\nset style fill solid noborder\n"
      "plot $cells using 1:2:3:4:5:6:7 with boxxyerror fillcolor palette\n",
      palette, range.least, range.most, grid.heads, rows, layer_tics(grid));
  return inline_svg(gnuplot_svg(script, kWidth, height, name), name, label);
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
  constexpr int kHeight = 400;
  const double line = std::clamp(330.0 * static_cast<double>(every) / (last + 1), 0.35, 2.5);
  const std::string script =
      frame() + block +
      fmt::format(
          "unset key\nset xrange [{}:{}]\nset yrange [0:{}]\nset xlabel 'query position'\n"
          "set ylabel 'token position'\nset lmargin 9\nset rmargin 3\nset tmargin 1\n"
          "plot $lives using 1:2:3:(0) with vectors nohead lw {} lc rgb '{}'\n",
          kept.queries.front(), last + step, last + 1, line, light_of(colour));
  return inline_svg(gnuplot_svg(script, kWidth, kHeight, name), name, label);
}

}  // namespace kvlab
