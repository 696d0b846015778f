#include "sim/report/interactive/dataset.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <stdexcept>

#include "traces/base/json.hpp"
#include "traces/base/text.hpp"

namespace kvlab {
namespace {

using nlohmann::ordered_json;

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

std::string base64(const std::vector<std::uint8_t>& bytes) {
  constexpr std::string_view kLetters =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  text.reserve((bytes.size() + 2) / 3 * 4);
  for (std::size_t at = 0; at < bytes.size(); at += 3) {
    const std::size_t count = std::min<std::size_t>(3, bytes.size() - at);
    std::uint32_t three = 0;
    for (std::size_t i = 0; i < 3; ++i) three = three << 8 | (i < count ? bytes[at + i] : 0u);
    for (std::size_t i = 0; i < 4; ++i)
      text += i <= count ? kLetters[three >> (18 - 6 * i) & 63] : '=';
  }
  return text;
}

/// Packs values as little-endian numbers: float64 (`width` 8), float32 (4), or float32 rounded to
/// its upper 3 bytes (3).
ordered_json pack(const std::vector<double>& values, unsigned width) {
  std::vector<std::uint8_t> bytes;
  bytes.reserve(values.size() * width);
  for (const double value : values) {
    std::uint64_t bits = std::bit_cast<std::uint64_t>(value);
    if (width < 8)
      bits = std::uint64_t{std::bit_cast<std::uint32_t>(static_cast<float>(value))} << 32;
    if (width == 3 && std::isfinite(value)) bits += std::uint64_t{0x80} << 32;
    for (unsigned b = 8 - width; b < 8; ++b)
      bytes.push_back(static_cast<std::uint8_t>(bits >> (8 * b)));
  }
  return {{"bytes", width}, {"base64", base64(bytes)}};
}

/// How precisely the page stores the metrics by layer and by head: bytes per number, and what is
/// left out.
struct Detail {
  unsigned layer_width = 4, head_width = 4;
  bool head_errors = true, heads = true, only_ranking_heads = false;
};

/// The parts of the model at one level: the whole model, its layers, or its heads.
struct Level {
  const char* name;
  std::vector<Scope> places;
};

class Dataset {
 public:
  Dataset(const MetricTable& metric_table, std::span<const SequenceGroup> groups,
          const DatasetOptions& options)
      : metric_table_(metric_table), options_(options), groups_(groups) {
    std::set<std::int32_t> layers;
    for (const SequenceGroup& group : groups)
      for (const ResultRow& row : group.rows) {
        if (row.layer < 0) continue;
        layers.insert(row.layer);
        heads_ = std::max(heads_, row.head + 1);
      }
    layers_.assign(layers.begin(), layers.end());
    levels_ = {{"all", {{}}}, {"layer", {}}, {"head", {}}};
    for (const std::int32_t layer : layers_) {
      levels_[1].places.push_back({layer, -1});
      for (std::int32_t head = 0; head < heads_; ++head) levels_[2].places.push_back({layer, head});
    }
  }

  ordered_json json(const std::vector<SeriesStyle>& styles) {
    choose_detail();
    ordered_json groups = ordered_json::array(), values = ordered_json::array(),
                 ranking = ordered_json::array();
    for (const SequenceGroup& group : groups_) {
      const MetricTable own(group.rows);
      groups.push_back({{"name", group.name}, {"sequences", own.traces().size()}});
      values.push_back(values_of(own));
      ranking.push_back(ranking_of(own));
    }
    return {{"headline", options_.headline},
            {"budget", budget_index()},
            {"layers", layers_},
            {"heads", heads_},
            {"series", series(styles)},
            {"budgets", budgets()},
            {"metrics", metrics()},
            {"groups", groups},
            {"values", values},
            {"ranking", ranking},
            {"note", note()}};
  }

 private:
  /// The number of base64 bytes that the page would contain with this detail.
  double size(const Detail& detail) const {
    const auto cells = static_cast<double>(metric_table_.series().size() *
                                           metric_table_.budgets().size() * groups_.size());
    double bytes = 0;
    for (const MetricInfo& metric : options_.metrics) {
      const bool heads = detail.heads && (metric.ranks || !detail.only_ranking_heads);
      bytes += 16.0 + 2.0 * detail.layer_width * static_cast<double>(levels_[1].places.size());
      if (heads)
        bytes += (detail.head_errors ? 2.0 : 1.0) * detail.head_width *
                 static_cast<double>(levels_[2].places.size());
    }
    return cells * bytes * 4 / 3;
  }

  void choose_detail() {
    const Detail choices[] = {
        {}, {4, 3, true, true, true}, {3, 3, false, true, true}, {3, 3, false, false, true}};
    for (const Detail& choice : choices) {
      detail_ = choice;
      if (size(choice) <= static_cast<double>(options_.byte_limit)) return;
    }
  }

  std::string note() const {
    if (!detail_.heads)
      return "Metrics by head are in results.csv only, because the page would be too large.";
    const std::string full = "so that the page stays small; results.csv has them in full.";
    const std::string places =
        detail_.layer_width < 4 ? "Values by layer and by head" : "Values by head";
    if (!detail_.head_errors)
      return places + " have four digits, and those by head no standard errors, " + full;
    if (detail_.head_width < 4) return places + " have four digits, " + full;
    return "";
  }

  std::size_t budget_index() const {
    for (std::size_t b = 0; b < metric_table_.budgets().size(); ++b)
      if (metric_table_.budgets()[b].text == options_.budget) return b;
    return 0;
  }

  ordered_json series(const std::vector<SeriesStyle>& styles) const {
    ordered_json list = ordered_json::array();
    for (std::size_t s = 0; s < metric_table_.series().size(); ++s) {
      const Series& one = metric_table_.series()[s];
      list.push_back(style_json(styles[s]));
      list.back().update({{"label", one.label},
                          {"policy", one.policy},
                          {"params", one.params},
                          {"prefill", one.prefill},
                          {"positions", one.positions},
                          {"seed", one.seed}});
      if (one.is_oracle()) list.back()["oracle"] = true;
      if (one.is_full()) list.back()["full"] = true;
      if (!options_.drawn.empty() && !options_.drawn[s]) list.back()["bound"] = false;
    }
    return list;
  }

  ordered_json budgets() const {
    ordered_json list = ordered_json::array();
    for (const BudgetColumn& budget : metric_table_.budgets())
      list.push_back(
          {{"text", budget.text},
           {"tokens", (static_cast<double>(budget.min_tokens) + budget.max_tokens) / 2}});
    return list;
  }

  ordered_json metrics() const {
    ordered_json list = ordered_json::array();
    for (const MetricInfo& metric : options_.metrics)
      list.push_back({{"name", metric.name},
                      {"label", metric.label},
                      {"higher", metric.higher_is_better},
                      {"oracles", oracles_of(metric)}});
    return list;
  }

  /// The oracles for which is_informative() is true with this metric. Figures of the metric do not
  /// show other oracles.
  std::vector<std::string> oracles_of(const MetricInfo& metric) const {
    std::vector<std::string> names;
    for (const Series& one : metric_table_.series())
      if (one.is_oracle() && is_informative(one, metric.name)) names.push_back(one.policy);
    return names;
  }

  /// [metric][budget]: the rows of the table in order, and the choice.
  ordered_json ranking_of(const MetricTable& own) const {
    const std::vector<std::size_t> places = places_in(metric_table_, own);
    ordered_json ranking = ordered_json::object();
    for (const MetricInfo& metric : options_.metrics) {
      auto& tables = ranking[std::string(metric.name)] = ordered_json::array();
      for (const BudgetColumn& budget : metric_table_.budgets())
        tables.push_back(table_json(table_of(own, places, metric, budget.text)));
    }
    return ranking;
  }

  RankedTable table_of(const MetricTable& own, const std::vector<std::size_t>& places,
                       const MetricInfo& metric, const std::string& budget) const {
    if (const auto decided = options_.decided.find(budget); decided != options_.decided.end()) {
      RankedTable table = decided->second;
      if (metric.name != options_.headline)
        for (RankedRow& row : table.rows) row.from_lowest = {.mean = kNone};
      return table;
    }
    RankedTable table{.choice = metric_table_.series().size()};
    // Converts an index in `own` to one in metric_table_.
    const auto all = [&](std::size_t series) {
      return static_cast<std::size_t>(std::ranges::find(places, series) - places.begin());
    };
    if (metric.ranks) {
      const Ranking ranking = rank_policies(own, budget, metric, Frontier::skip);
      for (const RankedPolicy& one : ranking.ranked)
        table.rows.push_back({all(one.series), one.from_lowest, one.over_budget});
      if (!ranking.empty()) table.choice = all(ranking.ranked[ranking.winner].series);
      return table;
    }
    // Without a ranking, the rows have the order of the run.
    for (std::size_t s = 0; s < metric_table_.series().size(); ++s)
      if (!metric_table_.series()[s].is_oracle() && !metric_table_.series()[s].is_full())
        table.rows.push_back({s, {.mean = kNone}});
    return table;
  }

  /// Converts a table to JSON. A row is [series, difference, low, high, whether it is over budget].
  static ordered_json table_json(const RankedTable& table) {
    ordered_json rows = ordered_json::array();
    const auto number = [](double value) {
      return std::isfinite(value) ? ordered_json(std::stod(fmt::format("{:.6g}", value)))
                                  : ordered_json(nullptr);
    };
    for (const RankedRow& row : table.rows)
      rows.push_back({row.series, number(row.from_lowest.mean),
                      number(row.from_lowest.interval.low), number(row.from_lowest.interval.high),
                      row.over_budget ? 1 : 0});
    return {{"choice", table.choice}, {"rows", rows}};
  }

  ordered_json values_of(const MetricTable& own) const {
    ordered_json values = ordered_json::object();
    for (const MetricInfo& metric : options_.metrics) {
      ordered_json table = ordered_json::object();
      for (const Level& level : levels_) {
        const bool heads = level.name == std::string_view("head");
        if (heads && (!detail_.heads || (detail_.only_ranking_heads && !metric.ranks))) continue;
        if (auto numbers = level_of(own, metric, level, heads); !numbers.is_null())
          table[level.name] = std::move(numbers);
      }
      if (own.traces().size() > 1) table["sequences"] = sequences_of(own, metric);
      values[std::string(metric.name)] = std::move(table);
    }
    return values;
  }

  /// For each series of `all`, the index of the same series in `own`. A group may lack some series;
  /// their index is own.series().size().
  static std::vector<std::size_t> places_in(const MetricTable& all, const MetricTable& own) {
    std::vector<std::size_t> places;
    for (const Series& one : all.series()) {
      std::size_t at = own.series().size();
      for (std::size_t s = 0; s < own.series().size(); ++s) {
        const Series& other = own.series()[s];
        if (other.policy == one.policy && other.params == one.params &&
            other.prefill == one.prefill && other.positions == one.positions &&
            other.seed == one.seed)
          at = s;
      }
      places.push_back(at);
    }
    return places;
  }

  /// Calls `visit` for each series and budget, with the index of the series in `own`.
  template <class Visit>
  void for_cells(const MetricTable& own, Visit&& visit) const {
    for (const std::size_t s : places_in(metric_table_, own))
      for (const BudgetColumn& budget : metric_table_.budgets()) visit(s, budget.text);
  }

  ordered_json level_of(const MetricTable& own, const MetricInfo& metric, const Level& level,
                        bool heads) const {
    std::vector<double> values, errors;
    std::vector<std::uint64_t> counts;
    std::set<std::uint64_t> distinct;
    for_cells(own, [&](std::size_t s, const std::string& budget) {
      for (const Scope& place : level.places) {
        const bool there = s < own.series().size();
        const auto average = there ? own.average(s, budget, metric.name, place) : std::nullopt;
        std::uint64_t count = 0;
        if (average)
          for (const ResultRow* row : own.rows(s, budget, metric.name, place)) count += row->count;
        values.push_back(average ? average->mean : kNone);
        errors.push_back(average ? average->standard_error : kNone);
        counts.push_back(count);
        if (average) distinct.insert(count);
      }
    });
    if (distinct.empty()) return nullptr;
    const unsigned width = heads                     ? detail_.head_width
                           : level.places.size() > 1 ? detail_.layer_width
                                                     : 8;
    ordered_json table{{"value", pack(values, width)}};
    const bool any_error =
        std::ranges::any_of(errors, [](double error) { return !std::isnan(error); });
    if (any_error && (!heads || detail_.head_errors)) table["error"] = pack(errors, width);
    if (distinct.size() == 1)
      table["count"] = *distinct.begin();
    else
      table["count"] = counts;
    return table;
  }

  ordered_json sequences_of(const MetricTable& own, const MetricInfo& metric) const {
    std::vector<double> values;
    for_cells(own, [&](std::size_t s, const std::string& budget) {
      const auto rows = s < own.series().size() ? own.rows(s, budget, metric.name)
                                                : std::vector<const ResultRow*>{};
      for (std::size_t t = 0; t < own.traces().size(); ++t)
        values.push_back(t < rows.size() ? rows[t]->value : kNone);
    });
    return {{"places", own.traces().size()}, {"value", pack(values, 4)}};
  }

  const MetricTable& metric_table_;
  const DatasetOptions& options_;
  std::span<const SequenceGroup> groups_;
  std::vector<std::int32_t> layers_;
  std::int32_t heads_ = 0;
  std::vector<Level> levels_;
  Detail detail_;
};

}  // namespace

ordered_json dataset_of(const MetricTable& metric_table, const std::vector<SeriesStyle>& styles,
                        std::span<const SequenceGroup> groups, const DatasetOptions& options) {
  return Dataset(metric_table, groups, options).json(styles);
}

}  // namespace kvlab
