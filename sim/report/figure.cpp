#include "sim/report/figure.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "traces/base/files.hpp"
#include "traces/base/json.hpp"
#include "traces/base/process.hpp"

namespace kvlab {
namespace {

using nlohmann::ordered_json;

/// Positive values get a logarithmic axis if the largest is more than this many times the smallest,
/// as in sim/report/page/text.js.
constexpr double kWideSpan = 10;

double tokens_of(const BudgetColumn& budget) {
  return (static_cast<double>(budget.min_tokens) + budget.max_tokens) / 2;
}

bool spans_decades(const std::vector<FigureSeries>& series) {
  double min_y = std::numeric_limits<double>::infinity(), max_y = 0;
  for (const FigureSeries& one : series)
    for (const FigurePoint& point : one.points) {
      if (!(point.y >= 0)) return false;
      if (point.y > 0) min_y = std::min(min_y, point.y), max_y = std::max(max_y, point.y);
    }
  return max_y > kWideSpan * min_y;
}

/// A metric's average as a point, with an error bar of one standard error.
FigurePoint point_of(double x, const Average& average) {
  const double error = average.standard_error;
  return {.x = x, .y = average.mean, .y_low = average.mean - error, .y_high = average.mean + error};
}

/// Those series of `drawn` that have points. points_of(series) must return the points of a series.
template <class PointsOf>
std::vector<FigureSeries> series_with(const MetricTable& metric_table,
                                      const std::vector<std::size_t>& drawn, PointsOf&& points_of) {
  const auto styles = styles_of(metric_table.series());
  std::vector<FigureSeries> series;
  for (const std::size_t s : drawn)
    if (auto points = points_of(s); !points.empty())
      series.push_back({metric_table.series()[s].label, styles[s], std::move(points)});
  return series;
}

ordered_json point_json(const FigurePoint& point) {
  ordered_json json{{"x", point.x}, {"y", point.y}};
  const auto bar = [&](const char* low_name, double low, const char* high_name, double high) {
    if (std::isfinite(low) && std::isfinite(high)) json[low_name] = low, json[high_name] = high;
  };
  bar("x_low", point.x_low, "x_high", point.x_high);
  bar("y_low", point.y_low, "y_high", point.y_high);
  if (!point.note.empty()) json["note"] = point.note;
  return json;
}

/// Makes a figure fit a logarithmic axis. Zeros, and the ends of error bars that would be below the
/// axis, are drawn at a floor below the smallest positive value. If there are zeros, the title of
/// the axis says so.
Figure floor_axis(Figure figure) {
  if (!figure.y.logarithmic) return figure;
  double min_y = std::numeric_limits<double>::infinity();
  bool zeros = false;
  for (const FigureSeries& one : figure.series)
    for (const FigurePoint& point : one.points) {
      if (point.y > 0) min_y = std::min(min_y, point.y);
      zeros = zeros || point.y == 0;
    }
  if (zeros) figure.y.title += " (0 is drawn at the bottom)";
  const double floor = min_y / 2;
  for (FigureSeries& one : figure.series)
    for (FigurePoint& point : one.points) {
      point.y = std::max(point.y, floor);
      if (point.y_low < floor) point.y_low = floor;
      if (point.y_high < floor) point.y_high = floor;
    }
  return figure;
}

ordered_json axis_json(const FigureAxis& axis) {
  return {{"title", axis.title},
          {"log", axis.logarithmic},
          {"base", axis.base},
          {"ticks", axis.ticks},
          {"names", axis.names}};
}

/// A unique name for a series in a figure's rows, because labels may be equal.
std::string line_name(std::size_t s) { return fmt::format("s{}", s); }

/// A Vega-Lite channel that maps each line to value(its style).
template <class Value>
ordered_json look_of(const std::vector<FigureSeries>& series, Value&& value) {
  ordered_json names = ordered_json::array(), values = ordered_json::array();
  for (std::size_t s = 0; s < series.size(); ++s) {
    names.push_back(line_name(s));
    values.push_back(value(series[s].style));
  }
  return {{"field", "line"},
          {"type", "nominal"},
          {"scale", {{"domain", names}, {"range", values}}},
          {"legend", nullptr}};
}

ordered_json stroke_of(const std::vector<FigureSeries>& series) {
  return look_of(series, [](const SeriesStyle& style) { return light_of(style.colour); });
}
ordered_json dash_of(const std::vector<FigureSeries>& series) {
  return look_of(series, [](const SeriesStyle& style) {
    return style.dash.empty() ? std::vector<int>{1, 0} : style.dash;
  });
}
/// Adds the channels that describe the markers to `encoding`.
void add_markers(ordered_json& encoding, const std::vector<FigureSeries>& series) {
  encoding["stroke"] = stroke_of(series);
  encoding["fill"] = look_of(series, [](const SeriesStyle& style) {
    return style.filled ? light_of(style.colour) : std::string_view("#ffffff");
  });
  encoding["shape"] = look_of(series, [](const SeriesStyle& style) {
    return style.shape.empty() ? std::string_view("circle") : style.shape;
  });
}
/// A Vega-Lite layer that draws the markers of those rows that have one.
ordered_json marker_layer(ordered_json encoding, const std::vector<FigureSeries>& series) {
  add_markers(encoding, series);
  return {{"transform", {{{"filter", "datum.marked"}}}},
          {"mark", {{"type", "point"}, {"opacity", 1}, {"size", 46}}},
          {"encoding", encoding}};
}

ordered_json channel(const char* field, const FigureAxis& axis) {
  ordered_json scale{{"type", axis.logarithmic ? "log" : "linear"},
                     {"zero", false},
                     {"nice", false},
                     {"padding", 12}};
  if (axis.logarithmic) scale["base"] = axis.base;
  ordered_json drawn{
      {"grid", std::string_view(field) == "y"}, {"labelOverlap", "greedy"}, {"labelSeparation", 8}};
  if (!axis.ticks.empty()) drawn["values"] = axis.ticks;
  if (!axis.names.empty()) {
    drawn["values"] = ordered_json::array();
    for (std::size_t i = 0; i < axis.names.size(); ++i) drawn["values"].push_back(i);
    drawn["labelExpr"] = json_text(ordered_json(axis.names), -1) + "[datum.value]";
    drawn["labelLimit"] = 320;
    scale["reverse"] = std::string_view(field) == "y";
  }
  return {{"field", field},
          {"type", "quantitative"},
          {"title", axis.title},
          {"scale", scale},
          {"axis", drawn}};
}

/// A legend that shows line, dash and marker together, which the legends of Vega-Lite do not.
ordered_json legend_of(const Figure& figure) {
  constexpr int kRow = 19, kSample = 34;
  ordered_json rows = ordered_json::array();
  for (std::size_t s = 0; s < figure.series.size(); ++s)
    rows.push_back({{"line", line_name(s)},
                    {"label", figure.series[s].label},
                    {"row", s},
                    {"marked", !figure.series[s].style.shape.empty()}});
  const ordered_json y{{"field", "row"}, {"type", "ordinal"}, {"axis", nullptr}};
  ordered_json layers = ordered_json::array();
  if (figure.joined)
    layers.push_back({{"mark", {{"type", "rule"}, {"strokeWidth", 1.8}}},
                      {"encoding",
                       {{"x", {{"value", 0}}},
                        {"x2", {{"value", kSample}}},
                        {"y", y},
                        {"stroke", stroke_of(figure.series)},
                        {"strokeDash", dash_of(figure.series)}}}});
  layers.push_back(marker_layer({{"x", {{"value", kSample / 2}}}, {"y", y}}, figure.series));
  layers.push_back(
      {{"mark", {{"type", "text"}, {"align", "left"}, {"fontSize", 12}, {"limit", 320}}},
       {"encoding",
        {{"x", {{"value", kSample + 6}}},
         {"y", y},
         {"text", {{"field", "label"}, {"type", "nominal"}}}}}});
  return {{"width", 200},
          {"height", kRow * figure.series.size()},
          {"data", {{"values", rows}}},
          {"view", {{"stroke", nullptr}}},
          {"layer", layers}};
}

/// Error bars along one axis, for the points that have both ends.
ordered_json bars_of(const Figure& figure, const char* along, const char* across) {
  const std::string name = along, low = name + "_low", high = name + "_high";
  return {{"transform", {{{"filter", fmt::format("isValid(datum.{})", low)}}}},
          {"mark", {{"type", "rule"}, {"strokeWidth", 1.3}}},
          {"encoding",
           {{along, channel(low.c_str(), name == "x" ? figure.x : figure.y)},
            {name + "2", {{"field", high}}},
            {across, channel(across, name == "x" ? figure.y : figure.x)},
            {"stroke", stroke_of(figure.series)}}}};
}

ordered_json whole(ordered_json spec, const std::string& title) {
  ordered_json json{
      {"$schema", "https://vega.github.io/schema/vega-lite/v5.json"},
      {"title", {{"text", title}, {"anchor", "start"}, {"fontSize", 13}}},
      {"config",
       {{"axis", {{"labelFontSize", 12}, {"titleFontSize", 12}, {"titleFontWeight", "normal"}}},
        {"view", {{"stroke", nullptr}}}}}};
  json.update(spec);
  return json;
}

// Converts Vega-Lite to pictures with a separate program.

namespace fs = std::filesystem;

constexpr const char* kByModule = R"(import sys
sys.path = [folder for folder in sys.path if folder]  # not the working folder
try:
    import vl_convert
except ImportError:
    sys.exit(127)
for name in sys.argv[1:]:
    spec = open(name + ".vl.json", encoding="utf-8").read()
    open(name + ".svg", "w", encoding="utf-8").write(vl_convert.vegalite_to_svg(spec))
    open(name + ".png", "wb").write(vl_convert.vegalite_to_png(spec, scale=2))
)";

/// Runs a program. Returns false if it does not exist. Throws std::runtime_error if it fails.
bool ran(std::vector<std::string> words, const fs::path& log) {
  const std::string program = words.front();
  int status = 127;
  try {
    status = run_program(std::move(words), log);
  } catch (const std::system_error& error) {
    if (error.code().value() != ENOENT) throw;
  }
  if (status == 127) return false;
  if (status != 0)
    throw std::runtime_error(
        fmt::format("--figures: {} failed: {}", program,
                    read_text_file(log, std::size_t{64} << 20).substr(0, 4096)));
  return true;
}

bool by_command(const std::vector<std::string>& names, const fs::path& log) {
  for (const std::string& name : names) {
    const std::string in = name + ".vl.json";
    if (!ran({"vl-convert", "vl2svg", "-i", in, "-o", name + ".svg"}, log)) return false;
    ran({"vl-convert", "vl2png", "--scale", "2", "-i", in, "-o", name + ".png"}, log);
  }
  return true;
}

}  // namespace

Figure curve_figure(const MetricTable& metric_table, const std::vector<std::size_t>& drawn,
                    const MetricInfo& metric) {
  Figure figure{.name = std::string(metric.name),
                .title = std::string(metric.label),
                .x = {.title = "budget, tokens", .logarithmic = true},
                .y = {.title = std::string(metric.label)}};
  for (const BudgetColumn& budget : metric_table.budgets())
    figure.x.ticks.push_back(tokens_of(budget));
  figure.series = series_with(metric_table, drawn, [&](std::size_t s) {
    std::vector<FigurePoint> points;
    for (const BudgetColumn& budget : metric_table.budgets())
      if (const auto average = metric_table.average(s, budget.text, metric.name))
        points.push_back(point_of(tokens_of(budget), *average));
    return points;
  });
  figure.y.logarithmic = !metric.higher_is_better && spans_decades(figure.series);
  return figure;
}

Figure frontier_figure(const MetricTable& metric_table, const std::vector<std::size_t>& drawn,
                       const MetricInfo& metric) {
  Figure figure{.name = "frontier",
                .title = fmt::format("{} against memory", metric.label),
                .x = {.title = "keys and values, KiB", .logarithmic = true, .base = 2},
                .y = {.title = std::string(metric.label)}};
  figure.series = series_with(metric_table, drawn, [&](std::size_t s) {
    std::vector<FigurePoint> points;
    for (const BudgetColumn& budget : metric_table.budgets()) {
      const auto score = metric_table.average(s, budget.text, metric.name);
      auto held = metric_table.average(s, budget.text, "kv_bytes_mean");
      const auto peak = metric_table.average(s, budget.text, "kv_bytes_peak");
      if (!held) held = metric_table.average(s, budget.text, "kv_bytes");
      if (!held) held = peak;
      if (!score || !held || !(held->mean > 0)) continue;
      points.push_back(point_of(held->mean / 1024, *score));
      points.back().note = "budget " + budget.text;
      if (peak) points.back().x_low = held->mean / 1024, points.back().x_high = peak->mean / 1024;
    }
    return points;
  });
  figure.y.logarithmic = spans_decades(figure.series);
  return figure;
}

ordered_json page_json(const Figure& figure) {
  ordered_json series = ordered_json::array();
  for (const FigureSeries& one : figure.series) {
    series.push_back(style_json(one.style));
    series.back()["label"] = one.label;
    for (const FigurePoint& point : one.points)
      series.back()["points"].push_back(point_json(point));
  }
  return {{"name", figure.name},      {"title", figure.title},   {"x", axis_json(figure.x)},
          {"y", axis_json(figure.y)}, {"joined", figure.joined}, {"series", series}};
}

void add_figures(ordered_json& data, const std::vector<Figure>& figures) {
  for (const Figure& figure : figures)
    if (!figure.series.empty()) data["figures"].push_back(page_json(figure));
}

ordered_json vega_lite(const Figure& given) {
  const Figure figure = floor_axis(given);
  ordered_json rows = ordered_json::array();
  for (std::size_t s = 0; s < figure.series.size(); ++s)
    for (const FigurePoint& point : figure.series[s].points) {
      rows.push_back(point_json(point));
      rows.back()["line"] = line_name(s);
      rows.back()["marked"] = !figure.series[s].style.shape.empty();
    }
  const ordered_json x = channel("x", figure.x), y = channel("y", figure.y);
  ordered_json layers{bars_of(figure, "y", "x"), bars_of(figure, "x", "y")};
  if (figure.joined)
    layers.push_back({{"mark", {{"type", "line"}, {"strokeWidth", 1.8}}},
                      {"encoding",
                       {{"x", x},
                        {"y", y},
                        {"stroke", stroke_of(figure.series)},
                        {"strokeDash", dash_of(figure.series)}}}});
  layers.push_back(marker_layer({{"x", x}, {"y", y}}, figure.series));
  const ordered_json plot{
      {"width", 480}, {"height", 340}, {"data", {{"values", rows}}}, {"layer", layers}};
  return whole({{"hconcat", {plot, legend_of(figure)}}}, figure.title);
}

NamedFigures vega_lites(const std::vector<Figure>& figures) {
  NamedFigures named;
  for (const Figure& figure : figures)
    if (!figure.series.empty()) named.emplace_back(figure.name, vega_lite(figure));
  return named;
}

ordered_json vega_lite(const HeadGrid& grid, const std::string& title, std::string_view metric) {
  ordered_json rows = ordered_json::array();
  for (std::size_t l = 0; l < grid.layers.size(); ++l)
    for (std::size_t h = 0; h < grid.heads; ++h)
      if (const auto& cell = grid.cells[l * grid.heads + h])
        rows.push_back({{"layer", grid.layers[l]}, {"head", h}, {"value", *cell}});
  const auto axis = [](const char* field, const char* name) {
    return ordered_json{{"field", field},
                        {"type", "ordinal"},
                        {"title", name},
                        {"axis", {{"labelAngle", 0}, {"domain", false}, {"ticks", false}}}};
  };
  return whole({{"width", {{"step", 34}}},
                {"height", {{"step", 22}}},
                {"data", {{"values", rows}}},
                {"mark", "rect"},
                {"encoding",
                 {{"x", axis("head", "KV head")},
                  {"y", axis("layer", "layer")},
                  {"color",
                   {{"field", "value"},
                    {"type", "quantitative"},
                    {"title", metric},
                    {"scale",
                     {{"domainMin", 0},
                      {"range", {"#f4f1e6", "#a9d6c5", "#4fa3b8", "#2a6496", "#1d2f63"}}}}}}}}},
               title);
}

std::string write_figures(const NamedFigures& figures, const AtomicFolder& folder) {
  std::vector<std::string> names;
  for (const auto& [name, spec] : figures) {
    names.push_back((folder / name).string());
    write_file_atomically(names.back() + ".vl.json", json_text(spec, 1) + "\n");
  }
  const TemporaryFolder scratch;
  const fs::path log = scratch / "messages";
  std::vector<std::string> words{"python3", "-c", kByModule};
  words.insert(words.end(), names.begin(), names.end());
  const bool drawn = by_command(names, log) || ran(std::move(words), log);
  return drawn ? ""
               : "figures are written as Vega-Lite only, because vl-convert is not installed (pip "
                 "install vl-convert-python)";
}

namespace {

// The first colours are those of Okabe and Ito, darkened for a light page. Each further colour was
// chosen so that it differs as much as possible from all colours before it, and has a contrast of
// at least 3 to 1 with the page.
constexpr std::array kColours{
    PageColour{"ink", "#1c2024", "#e6e8ea"},       PageColour{"muted", "#6b7278", "#9aa2a9"},
    PageColour{"rule", "#d9dde1", "#3a4046"},      PageColour{"blue", "#0063a8", "#4da3e0"},
    PageColour{"sky", "#2f97d0", "#8fd0f5"},       PageColour{"green", "#00805e", "#2fbf95"},
    PageColour{"vermilion", "#c64a00", "#f0803c"}, PageColour{"orange", "#c98500", "#f0b63c"},
    PageColour{"grey", "#858b91", "#a3a9af"},      PageColour{"purple", "#a94f86", "#dd93bd"},
    PageColour{"wine", "#7d2248", "#cf6f97"},      PageColour{"olive", "#7d7a1e", "#c4c05a"},
    PageColour{"brown", "#864401", "#ae8057"},     PageColour{"navy", "#000093", "#696be5"},
    PageColour{"violet", "#b56ffe", "#efbbff"},    PageColour{"moss", "#3d4903", "#7a8001"},
    PageColour{"rose", "#fe4b7f", "#ffb7b3"},      PageColour{"lime", "#0da926", "#53fead"},
    PageColour{"slate", "#044262", "#0781bc"},     PageColour{"indigo", "#6357f0", "#afa9f7"},
    PageColour{"rust", "#590b01", "#d14b14"},      PageColour{"plum", "#460261", "#7c7393"},
    PageColour{"pink", "#ce7e83", "#ff7281"},      PageColour{"orchid", "#d847be", "#ed8efd"},
    PageColour{"mauve", "#644885", "#b78ed4"},     PageColour{"magenta", "#6f10b1", "#b67cf6"},
    PageColour{"crimson", "#ba003a", "#d6466a"},   PageColour{"amethyst", "#9e3ccf", "#b653ba"},
    PageColour{"royal", "#2e2dc2", "#8a84cf"},     PageColour{"coral", "#fe5a05", "#d8a27f"},
    PageColour{"cobalt", "#0000ff", "#9600ff"},    PageColour{"fuchsia", "#ff00ff", "#e1ff00"},
    PageColour{"azure", "#3c87ff", "#00ff00"},
};

const std::map<std::string_view, std::string_view>& shelf() {
  static const std::map<std::string_view, std::string_view> kShelf{
      {"window", "blue"},        {"sink", "sky"},        {"lru", "green"},
      {"h2o", "vermilion"},      {"random", "grey"},     {"streaming_h2o", "orange"},
      {"a2sf", "wine"},          {"tova", "purple"},     {"lfu", "olive"},
      {"h2o_mean", "brown"},     {"roco", "navy"},       {"scissorhands", "violet"},
      {"lazy_eviction", "moss"}, {"snapkv", "rose"},     {"nacl", "lime"},
      {"knorm", "slate"},        {"keydiff", "indigo"},  {"vatp", "rust"},
      {"criticalkv", "plum"},    {"lagkv", "pink"},      {"expected_attention", "orchid"},
      {"r_kv", "mauve"},         {"feature", "magenta"}, {"full", "muted"},
      {"clock", "crimson"},      {"sieve", "amethyst"},  {"hisparse", "royal"}};
  return kShelf;
}

/// Colours for policies that are not in the registry.
constexpr std::array<std::string_view, 4> kOwn{"cobalt", "fuchsia", "azure", "coral"};

// A colour can be used in 80 different styles: 5 dashes and 8 shapes give 40 combinations (5 and 8
// have no common divisor), each with filled or open markers.
const std::array<std::vector<int>, 5> kDashes{
    std::vector<int>{}, {7, 4}, {2, 3}, {7, 3, 2, 3}, {10, 3, 2, 3, 2, 3}};
constexpr std::array<std::string_view, 8> kShapes{"circle",        "square",        "triangle-up",
                                                  "diamond",       "triangle-down", "cross",
                                                  "triangle-left", "triangle-right"};

/// The nth style of a colour. `base` is the index of its first marker, which differs between
/// policies.
SeriesStyle look(std::string_view colour, std::size_t base, std::size_t nth) {
  return {colour, kDashes[nth % kDashes.size()], kShapes[(base + nth) % kShapes.size()],
          nth / kShapes.size() % 2 == 0};
}

/// The style of an oracle. It has no marker as long as dashes are enough to distinguish the
/// oracles.
SeriesStyle oracle_look(std::string_view policy, std::size_t nth) {
  const std::size_t first = policy == kOracleAttention ? 1 : policy == kOracleTopk ? 2 : 3;
  SeriesStyle style = look("ink", 0, first + nth);
  if (nth < kDashes.size()) style.shape = "";
  return style;
}

/// For a policy that is not in the registry: the index at which the search for a free colour
/// starts.
std::size_t place_of(std::string_view name) {
  return std::accumulate(name.begin(), name.end(), std::size_t{0}, [](std::size_t sum, char c) {
    return 31 * sum + static_cast<unsigned char>(c);
  });
}

/// Assigns colours to the policies of a page.
class Colours {
 public:
  std::string_view colour(std::string_view policy) {
    if (const auto known = shelf().find(policy); known != shelf().end()) return known->second;
    const auto [own, added] = own_.try_emplace(policy);
    for (std::size_t i = place_of(policy); own->second.empty(); ++i)
      if (const std::string_view colour = kOwn[i % kOwn.size()];
          own_.size() > kOwn.size() || !is_taken(colour))
        own->second = colour;
    return own->second;
  }

 private:
  bool is_taken(std::string_view colour) const {
    return std::ranges::any_of(own_, [&](const auto& other) { return other.second == colour; });
  }

  // Colours of policies that are not in the registry.
  std::map<std::string_view, std::string_view> own_;
};

}  // namespace

std::span<const PageColour> page_colours() { return kColours; }

std::string_view light_of(std::string_view name) {
  for (const PageColour& colour : kColours)
    if (colour.name == name) return colour.light;
  throw std::out_of_range("no such page colour: " + std::string(name));
}

nlohmann::ordered_json style_json(const SeriesStyle& style) {
  return {{"colour", style.colour},
          {"dash", style.dash},
          {"shape", style.shape},
          {"filled", style.filled}};
}

std::vector<SeriesStyle> styles_of(std::span<const Series> series) {
  constexpr std::size_t kLooks = 80;
  Colours colours;
  std::vector<SeriesStyle> styles;
  for (const Series& entry : series) {
    SeriesStyle style;
    for (std::size_t nth = 0; nth < kLooks; ++nth) {
      style = entry.is_oracle() ? oracle_look(entry.policy, nth)
                                : look(colours.colour(entry.policy), place_of(entry.policy), nth);
      if (std::ranges::find(styles, style) == styles.end()) break;
    }
    styles.push_back(std::move(style));
  }
  return styles;
}

}  // namespace kvlab
