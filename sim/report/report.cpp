#include "sim/report/report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "sim/report/figure.hpp"
#include "sim/report/interactive/dataset.hpp"
#include "sim/report/page.hpp"
#include "sim/report/recommendation.hpp"
#include "sim/report/text.hpp"
#include "sim/run/ranking.hpp"
#include "sim/run/run.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

// Converts the tokens that heads kept over time to the JSON that the page's scripts read
// (sim/report/page/kept.js).

/// The label and colour of a kept series. They are those of its curve, if the run has one.
struct KeptLook {
  std::string label, colour;
};

using nlohmann::ordered_json;

ordered_json lives_of(const KeptSeries& series) {
  ordered_json flat = ordered_json::array();
  for (const Lifetime& life : series.lifetimes)
    for (const std::uint32_t number : {life.position, life.first_query, life.last_query})
      flat.push_back(number);
  return flat;
}

ordered_json attention_of(const KeptHead& head) {
  ordered_json rows = ordered_json::array();
  for (const auto& row : head.attention) {
    ordered_json flat = ordered_json::array();
    for (const Glance& glance : row) {
      flat.push_back(glance.position);
      flat.push_back(glance.level);
    }
    rows.push_back(std::move(flat));
  }
  return rows;
}

/// `tokens`: the text of each token; if empty, token ids are shown.
ordered_json kept_dataset(const Kept& kept, const std::vector<std::string>& tokens,
                          const std::function<KeptLook(const KeptSeries&)>& look) {
  ordered_json texts = tokens, heads = ordered_json::array();
  if (tokens.empty())
    for (const std::int32_t id : kept.ids) texts.push_back(fmt::format("{} ", id));
  for (const KeptHead& head : kept.heads) {
    ordered_json series = ordered_json::array();
    for (const KeptSeries& one : head.series) {
      const auto [label, colour] = look(one);
      series.push_back({{"label", label}, {"colour", colour}, {"lives", lives_of(one)}});
    }
    heads.push_back({{"layer", head.layer},
                     {"head", head.head},
                     {"series", series},
                     {"attention", attention_of(head)}});
  }
  return {{"trace", kept.trace},     {"budget", kept.budget}, {"has_text", !tokens.empty()},
          {"queries", kept.queries}, {"tokens", texts},       {"heads", heads}};
}

class Page {
 public:
  Page(const Run& run, const ReportOptions& options)
      : run_(run),
        metric_table_(run.rows),
        styles_(styles_of(metric_table_.series())),
        options_(options),
        headline_(*find_metric(best_metric(run.rows))),
        by_head_(best_by_head()),
        groups_(groups_of(run)),
        budget_(chosen_budget()) {
    // Metrics of several models are not averaged. The page opens with the first model.
    const MetricTable first(groups_.front().rows);
    const Ranking ranking = rank_policies(first, budget_.text, headline_, Frontier::skip);
    if (!ranking.empty())
      winner_ = series_like(first.series()[ranking.ranked[ranking.winner].series]);
  }

  PageDocument document() const {
    DatasetOptions options{.headline = std::string(headline_.name), .budget = budget_.text};
    for (const MetricInfo* metric : measured_metrics()) options.metrics.push_back(*metric);
    for (const Series& series : metric_table_.series())
      options.drawn.push_back(series.policy != kOracleTopk || bounds(series));
    auto data = dataset_of(metric_table_, styles_, groups_, options);
    data["kind"] = "replay";
    data["facts"] = facts();
    data["winner"] = nullptr;
    if (winner_) data["winner"] = *winner_;
    data["by_head"] = by_head_.name;
    std::string text;
    for (const SequenceGroup& group : groups_) {
      const auto made = recommendations(group);
      data["recommendations"].push_back(page_json(made, colours_of(group), group.name));
      text += (groups_.size() > 1 ? group.name + "\n" : "") + recommendations_text(made);
    }
    for (const MetricInfo* metric : measured_metrics())
      if (groups_.size() == 1 && metric->ranks && attention_metric(*metric))
        if (std::string note = oracle_sentence(metric_table_, *metric); !note.empty())
          data["oracle_notes"][std::string(metric->name)] = std::move(note);
    if (run_.kept) data["kept"] = kept_data();
    if (groups_.size() == 1) add_figures(data, {frontier(), buffers()});
    return {std::move(data), std::move(text)};
  }

  /// Writes the figures: every metric against the budget, the frontier, and the deciding metric by
  /// head.
  std::string write_figures(const AtomicFolder& folder) {
    if (groups_.size() > 1)
      throw std::runtime_error(fmt::format(
          "--figures: the run has {} models, such as {} and {}, and a figure would show their "
          "mean; replay each model separately",
          groups_.size(), groups_[0].name, groups_[1].name));
    std::vector<Figure> drawn{frontier(), buffers()};
    for (const MetricInfo* metric : measured_metrics())
      drawn.push_back(curve_figure(metric_table_, drawn_for(*metric), *metric));
    for (Figure& figure : drawn) figure.title += ", " + model();
    NamedFigures figures = vega_lites(drawn);
    if (winner_ && !layers_are_empty())
      figures.emplace_back(
          std::string(by_head_.name) + "_by_head",
          vega_lite(grid_of(*winner_),
                    fmt::format("{} of {}, budget {}", by_head_.label,
                                metric_table_.series()[*winner_].label, budget_.text),
                    by_head_.label));
    return kvlab::write_figures(figures, folder);
  }

 private:
  const MetricInfo& best_by_head() const {
    for (const std::string_view name :
         {headline_.name, std::string_view("kl_estimate"), std::string_view("residual_error")})
      if (std::ranges::any_of(
              run_.rows, [&](const ResultRow& row) { return row.head >= 0 && row.metric == name; }))
        return *find_metric(name);
    return *find_metric("nll_recall");
  }
  Figure frontier() const {
    return frontier_figure(metric_table_, drawn_for(headline_), headline_);
  }
  /// With refetch: the fetch rate against the size of the buffer, for the policies at their
  /// budgets, and for lru without protected tokens at nearly every size. Else empty.
  Figure buffers() const {
    if (run_.lru_curve.empty()) return {};
    const MetricInfo& rate = *find_metric("fetch_rate");
    Figure figure = curve_figure(metric_table_, drawn_for(rate), rate);
    figure.name = "buffers";
    figure.title = fmt::format("{} against the size of the buffer", rate.label);
    figure.x = {.title = "buffer, tokens of each KV head", .logarithmic = true, .base = 2};
    FigureSeries curve{"lru, all sizes", {"muted", {}, ""}, {}};
    // A curve may have a hundred thousand sizes. Steps of 2% are finer than a pixel.
    double next = 0;
    for (const LruPoint& point : mean_lru_curve(run_.lru_curve)) {
      if (point.budget_tokens < next) continue;
      next = 1.02 * point.budget_tokens;
      curve.points.push_back(
          {.x = static_cast<double>(point.budget_tokens), .y = point.fetch_rate});
    }
    figure.series.push_back(std::move(curve));
    return figure;
  }
  const BudgetColumn& chosen_budget() const {
    if (metric_table_.budgets().empty()) throw std::runtime_error(std::string(kNoBudgetInRun));
    if (!options_.budget.empty()) {
      if (const BudgetColumn* column = metric_table_.find_budget(options_.budget)) return *column;
      std::vector<std::string> known;
      for (const BudgetColumn& column : metric_table_.budgets()) known.push_back(column.text);
      throw std::invalid_argument(fmt::format("--budget {}: is not in this run, which has {}",
                                              options_.budget, fmt::join(known, ", ")));
    }
    const auto made =
        recommendations_of(MetricTable(groups_.front().rows), headline_, 0, std::string());
    if (made.empty()) return metric_table_.budgets().front();
    return *metric_table_.find_budget(made[decisive_budget(made)].scope.budget);
  }

  static bool attention_metric(const MetricInfo& metric) {
    return is_informative({.policy = std::string(kOracleAttention)}, metric.name);
  }

  std::vector<Recommendation> recommendations(const SequenceGroup& group) const {
    return recommendations_of(MetricTable(group.rows), headline_,
                              scored_tokens(run_.info, group.rows), std::string(kReplayNote));
  }

  /// Groups the rows by model, because a mean over several models has no meaning.
  static std::vector<SequenceGroup> groups_of(const Run& run) {
    std::map<std::string, std::string> weights_of, models_of;
    for (const RunTrace& trace : run.info.traces) {
      weights_of[trace.name] = trace.weights_xxh3 + trace.model;
      models_of[trace.weights_xxh3 + trace.model] = trace.model;
    }
    std::map<std::string, std::size_t> places;
    std::vector<SequenceGroup> groups;
    for (const ResultRow& row : run.rows) {
      const std::string& key = weights_of[row.trace];
      const auto [place, added] = places.try_emplace(key, groups.size());
      if (added) groups.push_back({models_of[key], {}});
      groups[place->second].rows.push_back(row);
    }
    return groups;
  }

  nlohmann::ordered_json kept_data() const {
    return kept_dataset(*run_.kept, options_.tokens, [&](const KeptSeries& kept) {
      const auto series = series_of(kept);
      return KeptLook{series ? metric_table_.series()[*series].label : kept.policy,
                      std::string(series ? styles_[*series].colour : "ink")};
    });
  }

  bool layers_are_empty() const {
    return std::ranges::none_of(run_.rows, [](const ResultRow& row) { return row.head >= 0; });
  }

  std::string model() const {
    std::vector<std::string> names;
    for (const SequenceGroup& group : groups_) names.push_back(group.name);
    return join_names(names);
  }

  /// The colours of the series of one model, by label. They are computed separately for each model,
  /// because a label depends on the other series of the same table.
  static ColourOf colours_of(const SequenceGroup& group) {
    const MetricTable own(group.rows);
    const auto styles = styles_of(own.series());
    std::map<std::string, std::string> colours;
    for (std::size_t s = 0; s < styles.size(); ++s)
      colours.try_emplace(own.series()[s].label, styles[s].colour);
    return [colours](const std::string& name) {
      const auto found = colours.find(name);
      return found == colours.end() ? std::string() : found->second;
    };
  }

  /// Data about the origin of the run: its traces, its request and its version.
  ordered_json facts() const {
    const RunInfo& info = run_.info;
    ordered_json traces = ordered_json::array();
    for (const RunTrace& trace : info.traces)
      traces.push_back({{"name", trace.name},
                        {"tokens", trace.tokens},
                        {"prompt_tokens", trace.prompt_tokens},
                        {"hash", trace.hash},
                        {"model", trace.model},
                        {"layers", trace.layers},
                        {"query_heads", trace.query_heads},
                        {"kv_heads", trace.kv_heads},
                        {"head_size", trace.head_size},
                        {"dtype", trace.dtype},
                        {"windows", trace.windows_text()},
                        {"weights", trace.weights_xxh3},
                        {"capture", json_text(*trace.capture, -1)}});
    return {{"traces", traces},
            {"queries", info.queries == Queries::decode ? "of decode segments" : "all"},
            {"layers", info.layers},
            {"threshold", info.threshold},
            {"refetch", info.refetch},
            {"buffer_sizes", buffer_sizes_text(run_.lru_curve)},
            {"run", run_.hash},
            {"kvlab", info.version},
            {"next", groups_.size() == 1 ? next() : std::string()}};
  }

  std::string next() const {
    // A deployed cache evicts for good, so a run with refetch cannot be deployed.
    if (!run_.info.refetch.empty())
      return fmt::format("kvlab predict {} --link link.json --model config.json --batch 1,8,32",
                         options_.folder);
    return fmt::format("kvlab deploy {} --budget {} --out policy.json", options_.folder,
                       budget_.text);
  }

  /// Whether oracle_topk is a bound for this series. It is one if no measured query may attend to
  /// more than B tokens, where B is the budget.
  bool bounds(const Series& series) const {
    return series.prefill == "stream" ||
           (run_.info.queries == Queries::decode && series.prefill == "dense");
  }

  std::vector<std::size_t> drawn_for(const MetricInfo& metric) const {
    std::vector<std::size_t> drawn;
    for (std::size_t s = 0; s < metric_table_.series().size(); ++s) {
      const Series& series = metric_table_.series()[s];
      if (series.is_full()) continue;
      if (series.is_oracle() && !is_informative(series, metric.name)) continue;
      if (series.policy == kOracleTopk && !bounds(series)) continue;
      drawn.push_back(s);
    }
    return drawn;
  }

  HeadGrid empty_grid() const {
    HeadGrid grid;
    for (const ResultRow& row : run_.rows) {
      if (row.layer < 0 || row.head < 0) continue;
      grid.heads = std::max(grid.heads, static_cast<std::size_t>(row.head) + 1);
      if (std::find(grid.layers.begin(), grid.layers.end(), row.layer) == grid.layers.end())
        grid.layers.push_back(row.layer);
    }
    std::sort(grid.layers.begin(), grid.layers.end());
    grid.cells.resize(grid.layers.size() * grid.heads);
    return grid;
  }

  /// The values of the metric by_head_ of a series, for each layer and head.
  HeadGrid grid_of(std::size_t series) const {
    HeadGrid grid = empty_grid();
    for (std::size_t l = 0; l < grid.layers.size(); ++l)
      for (std::size_t h = 0; h < grid.heads; ++h) {
        const Scope scope{grid.layers[l], static_cast<std::int32_t>(h)};
        if (const auto value = metric_table_.average(series, budget_.text, by_head_.name, scope))
          grid.cells[l * grid.heads + h] = value->mean;
      }
    return grid;
  }

  /// The index in metric_table_ of a series of another table of the run.
  std::optional<std::size_t> series_like(const Series& own) const {
    for (std::size_t s = 0; s < metric_table_.series().size(); ++s) {
      const Series& series = metric_table_.series()[s];
      if (series.policy == own.policy && series.params == own.params &&
          series.prefill == own.prefill && series.positions == own.positions &&
          series.seed == own.seed)
        return s;
    }
    return std::nullopt;
  }

  /// The index of the series of the same policy in the metric table, if the run has it.
  std::optional<std::size_t> series_of(const KeptSeries& kept) const {
    for (std::size_t s = 0; s < metric_table_.series().size(); ++s) {
      const Series& series = metric_table_.series()[s];
      if (series.policy == kept.policy && series.params == kept.params &&
          series.positions == kept.positions && series.prefill == run_.kept->prefill)
        return s;
    }
    return std::nullopt;
  }

  /// The metrics of which the run has values for all layers together.
  std::vector<const MetricInfo*> measured_metrics() const {
    std::vector<const MetricInfo*> metrics;
    for (const MetricInfo& metric : all_metrics())
      if (std::ranges::any_of(run_.rows, [&](const ResultRow& row) {
            return row.layer < 0 && row.metric == metric.name;
          }))
        metrics.push_back(&metric);
    return metrics;
  }

  const Run& run_;
  MetricTable metric_table_;
  std::vector<SeriesStyle> styles_;
  const ReportOptions& options_;
  const MetricInfo& headline_;
  const MetricInfo& by_head_;  ///< the best of the metrics that the run has by head
  std::vector<SequenceGroup> groups_;
  const BudgetColumn& budget_;
  std::optional<std::size_t> winner_;
};

}  // namespace

PageDocument report_page(const Run& run, const ReportOptions& options) {
  return Page(run, options).document();
}

std::string write_figures(const Run& run, const std::string& budget, const AtomicFolder& folder) {
  const ReportOptions options{.budget = budget};
  return Page(run, options).write_figures(folder);
}

}  // namespace kvlab
