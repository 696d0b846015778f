#include "sim/report/report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <functional>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "sim/report/figure.hpp"
#include "sim/report/html.hpp"
#include "sim/report/interactive/dataset.hpp"
#include "sim/report/page.hpp"
#include "sim/report/recommendation.hpp"
#include "sim/run/ranking.hpp"
#include "sim/run/run.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

// The tokens that heads kept over time, in the form that the interactive page reads
// (sim/report/page/kept.js).

/// The label and colour of a kept series: those of its curve, if the run has it.
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

/// The rank correlations that a fidelity measurement on a real model gave for a metric
/// (docs/internals/measurements/fidelity.md).
struct Evidence {
  std::string_view metric, least, most;
};
constexpr Evidence kEvidence[] = {{"kl_estimate_joint", "0.87", "0.98"},
                                  {"kl_estimate", "0.83", "0.95"},
                                  {"residual_error", "0.65", "0.91"},
                                  {"layer_error", "0.50", "0.92"},
                                  {"nll_recall", "0.41", "0.91"}};

constexpr const char* kCurves =
    "Bars are one standard error. Lines without markers are oracles, which use future attention "
    "and "
    "cannot be deployed. They are drawn for attention metrics alone. <code>oracle_attention</code> "
    "evicts "
    "the token with the least future attention; it is a heuristic, not a bound. "
    "<code>oracle_topk</code> keeps each query’s most probable tokens and bounds recall. The full "
    "cache has recall 1 and no error.";
constexpr const char* kSeen =
    "The text that the model read, up to one query. Shading: the attention that the full cache "
    "pays, mean over the head’s query heads. Tokens that a policy has evicted are struck out; "
    "those "
    "evicted since the step before are framed; evicted tokens that the query attends to are red.";
constexpr const char* kOfflineReplay =
    "Offline replay: queries and keys come from the full-cache run, so the effect of eviction on "
    "later layers and tokens is not included. <code>kvlab eval</code> measures it.";
constexpr const char* kMeanings =
    "<dt>recall</dt><dd>mean over queries of the full cache’s attention on the tokens kept</dd>\n"
    "<dt>recall, 10th percentile</dt><dd>10th percentile of recall over a head’s queries</dd>\n"
    "<dt>−ln recall</dt><dd>mean of −ln of the same: the divergence of the kept attention from the "
    "full</dd>\n"
    "<dt>miss rate</dt><dd>requested tokens that were gone, over all requested tokens</dd>\n"
    "<dt>output error</dt><dd>‖o − ô‖ / ‖o‖ of a head’s output, before the output projection</dd>\n"
    "<dt>layer error</dt><dd>the same with a layer’s heads side by side</dd>\n"
    "<dt>residual error</dt><dd>squared size of what the lost tokens change in the residual "
    "stream, over the stream’s own, summed over layers</dd>\n"
    "<dt>most live tokens</dt><dd>that a head held at once: a dense prompt is whole while it is "
    "read, whatever the budget</dd>\n"
    "<dt>oracle_attention</dt><dd>evicts by least future attention; strong, but no bound</dd>\n"
    "<dt>oracle_topk</dt><dd>each query’s most probable tokens; bounds recall and misses</dd>\n";

/// Builds the page, section by section.
class Page {
 public:
  Page(const Run& run, const ReportOptions& options)
      : run_(run),
        metric_table_(run.rows),
        styles_(styles_of(metric_table_.series())),
        options_(options),
        headline_(*find_metric(best_metric(run.rows))),
        by_head_(best_by_head()),
        budget_(chosen_budget()),
        groups_(groups_of(run)) {
    const Ranking ranking = rank_policies(metric_table_, budget_.text, headline_, Frontier::skip);
    if (!ranking.empty()) winner_ = ranking.standings[ranking.winner].series;
  }

  std::string html() {
    DatasetOptions options{.headline = std::string(headline_.name), .budget = budget_.text};
    for (const MetricInfo* metric : measured_metrics()) options.metrics.push_back(*metric);
    for (const Series& series : metric_table_.series())
      options.drawn.push_back(series.policy != kOracleTopk || bounds(series));
    auto data = dataset_of(metric_table_, styles_, groups_, options);
    data["winner"] = nullptr;
    if (winner_) data["winner"] = *winner_;
    data["by_head"] = by_head_.name;
    data["recommendations"] = ordered_json::array();
    for (const SequenceGroup& group : groups_)
      data["recommendations"].push_back(recommendations_json(recommendations(group)));
    for (const MetricInfo* metric : measured_metrics())
      if (groups_.size() == 1 && metric->ranks && attention_metric(*metric))
        if (std::string text = oracle_sentence(metric_table_, *metric); !text.empty())
          data["oracle_notes"][std::string(metric->name)] = std::move(text);
    if (run_.kept) data["kept"] = kept_data();
    std::string body = header();
    if (groups_.size() == 1) body += frontier_section(frontier(), data);
    body += html_open_section("explore", "What each budget buys", kCurves);
    if (!layers_are_empty())
      body += html_open_section("heads", "Where it is lost", data["note"].get<std::string>());
    if (run_.kept) body += html_open_section("kept", "What was kept, seen", kSeen);
    return html_page(title(), body + metrics() + provenance() + all_metrics_section(), data);
  }

  /// Every metric against the budget, the frontier, and the deciding metric by head.
  std::string write_figures(const AtomicFolder& folder) {
    if (groups_.size() > 1)
      throw std::runtime_error(fmt::format(
          "--figures: the run is of {} models ({} and {} among them), of which a figure would be "
          "the mean; replay them apart",
          groups_.size(), groups_[0].name, groups_[1].name));
    std::vector<Figure> drawn{frontier()};
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
  const BudgetColumn& chosen_budget() const {
    if (metric_table_.budgets().empty()) throw std::runtime_error(std::string(kNoBudgetInRun));
    if (!options_.budget.empty()) {
      if (const BudgetColumn* column = metric_table_.find_budget(options_.budget)) return *column;
      std::vector<std::string> known;
      for (const BudgetColumn& column : metric_table_.budgets()) known.push_back(column.text);
      throw std::invalid_argument(fmt::format("--budget {}: not in this run, which has {}",
                                              options_.budget, fmt::join(known, ", ")));
    }
    const auto made = recommendations_of(metric_table_, headline_, 0, "");
    if (made.empty()) return metric_table_.budgets().front();
    return *metric_table_.find_budget(made[decisive_budget(made)].scope.budget);
  }

  static bool attention_metric(const MetricInfo& metric) {
    return informs({.policy = std::string(kOracleAttention)}, metric.name);
  }

  std::vector<Recommendation> recommendations(const SequenceGroup& group) const {
    return recommendations_of(MetricTable(group.rows), headline_,
                              scored_tokens(run_.info, group.rows), std::string(kReplayNote));
  }

  /// The rows of each model in one group, because metrics of several models have no common mean.
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
  std::string title() const {
    return "kvlab: which tokens should the cache of " + model() + " keep?";
  }

  /// How well the deciding metric predicted end-to-end KL in measurements.
  std::string describe_evidence() const {
    for (const Evidence& evidence : kEvidence)
      if (evidence.metric == headline_.name)
        return fmt::format(
            "{} predicts the order of policies by end-to-end KL with rank correlation {} to {} "
            "(measured on SmolLM2, 20 policies, 8 texts). <code>kvlab fidelity</code> measures it "
            "on your model.",
            escape(capital(headline_.label)), evidence.least, evidence.most);
    return "";
  }
  static std::string capital(std::string_view text) {
    std::string own(text);
    own[0] = static_cast<char>(std::toupper(static_cast<unsigned char>(own[0])));
    return own;
  }
  /// "6 policies", "2 policies in 5 variants".
  std::string policies_text() const {
    std::set<std::string_view> names;
    std::size_t variants = 0;
    for (const Series& series : metric_table_.series()) {
      if (series.is_oracle() || series.is_full()) continue;
      names.insert(series.policy);
      ++variants;
    }
    std::string text = pluralize(names.size(), "policy", "policies");
    if (variants > names.size()) text += fmt::format(" in {} variants", variants);
    return text;
  }

  static std::string pluralize(std::size_t count, const char* one, const char* many) {
    return fmt::format("{} {}", count, count == 1 ? one : many);
  }

  std::string header() const {
    std::uint64_t tokens = 0;
    for (const RunTrace& trace : run_.info.traces) tokens += trace.tokens;
    const std::string context =
        fmt::format("{} at {}, replayed over {} ({} tokens).", policies_text(),
                    pluralize(metric_table_.budgets().size(), "budget", "budgets"),
                    pluralize(run_.info.traces.size(), "captured text", "captured texts"),
                    number_text(static_cast<double>(tokens)));
    std::string tables;
    for (const SequenceGroup& group : groups_) {
      const auto made = recommendations(group);
      const MetricTable own(group.rows);
      const auto styles = styles_of(own.series());
      const auto colour = [&](const std::string& name) {
        const auto found = std::ranges::find(own.series(), name, &Series::label);
        return found == own.series().end()
                   ? std::string()
                   : std::string(
                         styles[static_cast<std::size_t>(found - own.series().begin())].colour);
      };
      tables += recommendations_html(made, groups_.size() == 1 ? next() : "", colour,
                                     groups_.size() == 1 ? "" : group.name);
    }
    return html_front(
        "kvlab report", fmt::format("Which tokens should the cache of {} keep?", escape(model())),
        context, tables + fmt::format("<p class=\"quiet prose\">{}</p>\n", describe_evidence()));
  }

  std::string next() const {
    return fmt::format("kvlab deploy {} --budget {} --out policy.json", options_.folder,
                       budget_.text);
  }

  /// Whether oracle_topk is a bound for this series: no query may see more than B tokens.
  bool bounds(const Series& series) const {
    return series.prefill == "stream" ||
           (run_.info.queries == Queries::decode && series.prefill == "dense");
  }

  std::vector<std::size_t> drawn_for(const MetricInfo& metric) const {
    std::vector<std::size_t> drawn;
    for (std::size_t s = 0; s < metric_table_.series().size(); ++s) {
      const Series& series = metric_table_.series()[s];
      if (series.is_full()) continue;
      if (series.is_oracle() && !informs(series, metric.name)) continue;
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

  /// The metric by_head_ of `series` on each head.
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

  /// The curve of a kept series, if the run has it.
  std::optional<std::size_t> series_of(const KeptSeries& kept) const {
    for (std::size_t s = 0; s < metric_table_.series().size(); ++s) {
      const Series& series = metric_table_.series()[s];
      if (series.policy == kept.policy && series.params == kept.params &&
          series.positions == kept.positions && series.prefill == run_.kept->prefill)
        return s;
    }
    return std::nullopt;
  }

  static Cell cell(const MetricTable& metric_table, std::size_t series, std::string_view budget,
                   const MetricInfo& metric) {
    const auto average = metric_table.average(series, budget, metric.name);
    if (!average) return "–";
    return metric.name.find("_bytes") != std::string_view::npos ? bytes_cell(average->mean)
                                                                : average_cell(*average);
  }

  std::vector<Cell> metrics_row(const MetricTable& metric_table,
                                const std::vector<SeriesStyle>& styles, std::size_t series,
                                std::string_view budget) const {
    std::vector<Cell> row{series_html(metric_table, styles, series), escape(budget)};
    for (const MetricInfo* metric : measured_metrics())
      row.push_back(cell(metric_table, series, budget, *metric));
    return row;
  }

  /// The metrics that the run has.
  std::vector<const MetricInfo*> measured_metrics() const {
    std::vector<const MetricInfo*> metrics;
    for (const MetricInfo& metric : all_metrics())
      if (std::ranges::any_of(run_.rows, [&](const ResultRow& row) {
            return row.layer < 0 && row.metric == metric.name;
          }))
        metrics.push_back(&metric);
    return metrics;
  }

  std::string metrics_table_html(const SequenceGroup& group) const {
    const MetricTable metric_table(group.rows);
    const auto styles = styles_of(metric_table.series());
    std::vector<Column> columns{{"policy", false}, {"budget"}};
    for (const MetricInfo* metric : measured_metrics()) columns.push_back({escape(metric->label)});
    std::vector<std::vector<Cell>> rows;
    for (std::size_t s = 0; s < metric_table.series().size(); ++s) {
      if (metric_table.series()[s].is_full()) {
        rows.push_back(metrics_row(metric_table, styles, s, "all"));
        continue;
      }
      for (const BudgetColumn& budget : metric_table.budgets())
        if (!metric_table.rows(s, budget.text, "recall").empty())
          rows.push_back(metrics_row(metric_table, styles, s, budget.text));
    }
    return table(columns, rows, groups_.size() > 1 ? escape(group.name) : "");
  }

  std::string all_metrics_section() const {
    const char* averaged =
        run_.info.traces.size() > groups_.size() ? ", averaged over the sequences" : "";
    std::string tables;
    for (const SequenceGroup& group : groups_) tables += metrics_table_html(group);
    return html_section("All metrics",
                        fmt::format("Over all layers and heads{}. By layer and by head: "
                                    "<code>results.csv</code>.",
                                    averaged),
                        tables, "");
  }

  static std::string metrics() {
    return html_section("What the metrics mean", "",
                        fmt::format("<dl class=\"prose\">{}</dl>\n", kMeanings), "");
  }

  static std::string entry(std::string_view term, const std::string& html) {
    return fmt::format("<dt>{}</dt><dd>{}</dd>\n", term, html);
  }

  static std::string code(std::string_view text) {
    return text.empty() ? "–" : fmt::format("<code>{}</code>", escape(text));
  }

  static std::string trace_html(const RunTrace& trace) {
    return fmt::format(
        "{}: {} tokens, {} of them prompt; manifest {}<br>{}, {} layers, {} query and {} KV heads "
        "of {}, {}{}; weights "
        "{}<br>captured by {}",
        escape(trace.name), trace.tokens, trace.prompt_tokens, code(trace.hash),
        escape(trace.model), trace.layers, trace.query_heads, trace.kv_heads, trace.head_size,
        escape(trace.dtype), (trace.window_layers > 0 ? "; " : "") + trace.windows_text(),
        code(trace.weights_xxh3), code(json_text(*trace.capture, -1)));
  }

  std::string provenance() const {
    std::string entries, policies;
    for (const RunTrace& trace : run_.info.traces) entries += entry("trace", trace_html(trace));
    for (const Series& series : metric_table_.series())
      policies +=
          fmt::format("{}<code>{}{}</code> ({} positions, {} prefill)",
                      policies.empty() ? "" : "<br>", escape(series.policy),
                      series.params.empty() ? "" : fmt::format(":{}", escape(series.params)),
                      escape(series.positions), escape(series.prefill));
    const RunInfo& info = run_.info;
    entries += entry("policies", policies);
    entries += entry("queries", info.queries == Queries::decode ? "of decode segments" : "all");
    entries += entry("layers",
                     info.layers.empty() ? "all" : fmt::format("{}", fmt::join(info.layers, ", ")));
    entries += entry("request threshold", fmt::format("{}", info.threshold));
    entries += entry("run", code(run_.hash));
    entries += entry("kvlab", escape(info.version));
    return html_section("Where this comes from", kOfflineReplay, "<dl>" + entries + "</dl>\n", "");
  }

  const Run& run_;
  MetricTable metric_table_;
  std::vector<SeriesStyle> styles_;
  const ReportOptions& options_;
  const MetricInfo& headline_;
  const MetricInfo& by_head_;  ///< the best metric that the run has by head
  const BudgetColumn& budget_;
  std::vector<SequenceGroup> groups_;
  std::optional<std::size_t> winner_;
};

}  // namespace

std::string report_html(const Run& run, const ReportOptions& options) {
  return Page(run, options).html();
}

std::string write_figures(const Run& run, const std::string& budget, const AtomicFolder& folder) {
  const ReportOptions options{.budget = budget};
  return Page(run, options).write_figures(folder);
}

}  // namespace kvlab
