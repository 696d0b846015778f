#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <stdexcept>

#include "engine/capture.hpp"
#include "sim/device/cuda_replay.hpp"
#include "sim/report/recommendation.hpp"
#include "sim/report/text.hpp"
#include "sim/run/ranking.hpp"
#include "sim/run/replay_run.hpp"
#include "tools/command.hpp"
#include "tools/options.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

using nlohmann::ordered_json;

struct Request {
  ReplayRequest replay;
  CacheOptions caches;
  CommonOptions common;
  std::string out, model, layers;
  std::vector<std::string> show;  ///< metrics to print in addition
  bool references = true;
  bool shares_cores = true;  ///< whether the processes of a host share its cores
  std::optional<GivenOptions> given;
};

std::vector<std::uint32_t> parse_layers(const std::string& text) {
  std::vector<std::uint32_t> layers;
  for (const std::string& item : list_entries(text)) {
    const bool digits = !item.empty() && item.size() < 7 &&
                        item.find_first_not_of("0123456789") == std::string::npos;
    if (!digits)
      throw std::invalid_argument(
          fmt::format("--layers: '{}' should be layer numbers such as 0,1,5", item));
    layers.push_back(static_cast<std::uint32_t>(std::stoul(item)));
  }
  std::sort(layers.begin(), layers.end());
  layers.erase(std::unique(layers.begin(), layers.end()), layers.end());
  return layers;
}

void check(Request& request, const GivenOptions& given) {
  request.shares_cores = !given.has("threads");
  request.given = given;
}

/// Checks options after the processes of a replay (under mpirun) have connected to each other, so
/// that only one process reports an error.
void check_together(const Request& request) {
  const GivenOptions& given = *request.given;
  given.require("out", "--out RUN, a new directory");
  if (!given.has("policy-source")) given.require("policy", "--policy window,sink,h2o");
  given.require("trace", "--trace TRACE, a captured trace");
  for (const std::string& name : request.show)
    if (name != "all" && !find_metric(name))
      throw std::invalid_argument(fmt::format(
          "--show: '{}' should be all, or a metric of results.csv such as recall", name));
}

void add_options(OptionTable& table, Request& request) {
  ReplayOptions& options = request.replay.options;
  table.texts("trace", "TRACE", Takes::several_words, request.replay.traces,
              "captured traces; may be given several times");
  table.text("out", "RUN", request.out, "directory of the run; it must not exist yet");
  table.parsed("queries", "decode|all", options.queries, parse_queries,
               "queries to measure: those of decoded tokens, or all", "decode");
  add_threshold_option(table, request.caches.sweep.threshold);
  add_output_error_option(table, options.every_output_error,
                          "measure output errors at every eighth query (sample), or at all");
  table.text("model", "DIR", request.model,
             "checkpoint of the traces; only needed for features that are computed from its "
             "weights (value_out_norm1)");
  table.text("layers", "LIST", request.layers, "only these layers: 0,1,5 (default: all)");
  table.list("show", "LIST", request.show,
             "also print these metrics, by their names in results.csv, or all (default: only the "
             "metric that `kvlab deploy` chooses by)");
  table.parsed("refetch", "SELECTOR", options.refetch, parse_selector,
               "evicted tokens return when a query selects them: top:K (the K most probable "
               "tokens), page:P:K (K tokens in pages of P, after Quest) or logged (those that the "
               "trace lists); measures how many are fetched (default: evicted for good)");
  table.flag("no-references", request.references,
             "leave out full, oracle_attention and oracle_topk (with --refetch: full and belady)",
             false);
  table.flag("fresh", request.replay.fresh,
             "start from the beginning and delete the unfinished replay in RUN.part (default: "
             "continue it)");
  add_cache_options(table, request.caches, true);
  add_common_options(table, request.common, Device::cpu);
}

/// Prints one metric, policies by budgets, averaged over the traces.
void print_metric(const MetricTable& metric_table, const MetricInfo& metric, std::size_t width) {
  fmt::print("{:<{}}", metric.label, width + 2);
  for (const BudgetColumn& budget : metric_table.budgets()) fmt::print(" {:>7}", budget.text);
  fmt::print("\n");
  for (std::size_t s = 0; s < metric_table.series().size(); ++s) {
    const Series& series = metric_table.series()[s];
    std::string cells;
    for (const BudgetColumn& budget : metric_table.budgets()) {
      const auto average = metric_table.average(s, budget.text, metric.name);
      cells += average ? fmt::format(" {:>7.3f}", average->mean) : fmt::format(" {:>7}", "");
    }
    const bool says = !series.is_oracle() || is_informative(series, metric.name);
    if (says && cells.find_first_not_of(' ') != std::string::npos && !series.is_full())
      fmt::print("  {:<{}}{}\n", series.label, width, cells);
  }
  fmt::print("\n");
}

/// How many tokens the KV heads of a series kept at the end of a model's traces: the mean, the
/// minimum and the maximum, as in "24.5, 8 to 40". `trace` is one of these traces.
std::string kept_text(const RunTrace& trace, const MetricTable& metric_table, std::size_t series,
                      const std::string& budget) {
  std::vector<double> kept;
  for (std::uint32_t layer = 0; layer < trace.layers; ++layer)
    for (std::uint32_t head = 0; head < trace.kv_heads; ++head) {
      const Scope scope{static_cast<std::int32_t>(trace.number(layer)),
                        static_cast<std::int32_t>(head)};
      if (const auto own = metric_table.average(series, budget, "kv_bytes", scope))
        kept.push_back(own->mean / static_cast<double>(kv_bytes_per_token(trace.head_size)));
    }
  if (kept.empty()) return "";
  return fmt::format(
      "{:.1f}, {:.0f} to {:.0f}",
      std::accumulate(kept.begin(), kept.end(), 0.0) / static_cast<double>(kept.size()),
      std::ranges::min(kept), std::ranges::max(kept));
}

/// If budgets differ by head, prints how many tokens the heads kept.
void print_kept(const RunTrace& trace, const MetricTable& metric_table, std::size_t width) {
  for (const BudgetColumn& budget : metric_table.budgets()) {
    const bool in_file = budget.text.starts_with('@');
    if (!in_file && parse_budget(budget.text).is_even()) continue;
    fmt::print("tokens that a KV head kept of {}: mean, minimum to maximum\n", budget.text);
    for (std::size_t s = 0; s < metric_table.series().size(); ++s)
      if (!metric_table.series()[s].is_oracle() && !metric_table.series()[s].is_full())
        fmt::print("  {:<{}} {}\n", metric_table.series()[s].label, width,
                   kept_text(trace, metric_table, s, budget.text));
    fmt::print("\n");
  }
}

/// How much the full caches of a run lose by quantization in their tiers; "" if there is no loss.
std::string full_losses_text(const MetricTable& metric_table, const MetricInfo& metric) {
  std::string text;
  for (std::size_t s = 0; s < metric_table.series().size(); ++s) {
    const Series& series = metric_table.series()[s];
    const auto lost = metric_table.average(s, "all", metric.name);
    if (!series.is_full() || series.params.empty() || !lost) continue;
    text += fmt::format("{}:{} evicts nothing; its quantization costs {} {}\n", series.policy,
                        series.params, metric.label, number_text(lost->mean));
  }
  return text;
}

/// Prints results of one model, to which `trace` belongs: the deciding metric, the metrics of
/// --show, then the recommendations. Returns the budget that the next command should use (see
/// decisive_budget()), or "" if there is no recommendation. `tokens`: number of scored tokens.
std::string print_metrics(const RunTrace& trace, const std::vector<ResultRow>& rows,
                          const std::vector<std::string>& show, std::uint64_t tokens) {
  const MetricTable metric_table(rows);
  std::size_t width = 16;
  for (const Series& series : metric_table.series()) width = std::max(width, series.label.size());
  const std::string_view best = best_metric(rows);
  if (const std::string why = best_metric_text(rows); !why.empty()) fmt::print("{}\n\n", why);
  std::set<std::string> there;
  for (const ResultRow& row : rows)
    if (row.layer < 0) there.insert(row.metric);
  print_metric(metric_table, *find_metric(best), width);
  const bool all = std::ranges::find(show, "all") != show.end();
  for (const std::string& name : there)
    if (name != best && (all || std::ranges::find(show, name) != show.end())) {
      MetricInfo metric = *find_metric(name);
      if (name.starts_with(kPassageRecall)) metric.label = name;
      print_metric(metric_table, metric, width);
    }
  if (const std::string losses = full_losses_text(metric_table, *find_metric(best));
      !losses.empty())
    fmt::print("{}\n", losses);
  print_kept(trace, metric_table, width);
  const auto made =
      recommendations_of(metric_table, *find_metric(best), tokens, std::string(kReplayNote));
  fmt::print("{}", recommendations_text(made));
  for (const std::string& warning : recommendation_warnings(made))
    fmt::print("{}", wrap_columns("Note: " + warning + "."));
  return made.empty() ? "" : made[decisive_budget(made)].scope.budget;
}

/// If a budget exempts layers of a trace, prints the bytes of the exempt and of the other layers.
void print_exempt(const Run& run, const RunTrace& trace) {
  for (const RunConfig& config : run.info.sweep) {
    if (!Budget{.heads = config.budgets}.exempts()) continue;
    double peak = 0, exempt = 0;
    for (std::uint32_t layer = 0; layer < trace.layers; ++layer)
      for (const ResultRow& row : run.rows)
        if (row.trace == trace.name && row.layer == static_cast<int>(trace.number(layer)) &&
            row.head < 0 && row.metric == "kv_bytes_peak" && row.policy == config.policy &&
            row.params == config.params && row.budget == config.budget &&
            row.prefill == config.prefill && row.positions == config.positions) {
          peak += row.value;
          if (config.budgets[layer].front() == kNoBudget) exempt += row.value;
        }
    if (peak > 0)
      fmt::print("{}, {}, prefill {}, positions {}: {}\n", config.policy, config.budget,
                 config.prefill, config.positions, exempt_text(peak, exempt));
  }
}

/// The text for a run in which no policy evicted a token.
std::string text_without_eviction(const Run& run) {
  const bool only_full = std::ranges::all_of(
      run.rows, [](const ResultRow& row) { return row.policy == "full" || is_oracle(row.policy); });
  std::string text = only_full ? "" : std::string(kBudgetKeepsAll) + "\n";
  const MetricTable metric_table(run.rows);
  const std::string losses = full_losses_text(metric_table, *find_metric(best_metric(run.rows)));
  if (only_full && losses.empty()) text = "Only the full cache was replayed; it loses nothing.\n";
  return text + losses;
}

/// For the traces of one model, prints how large the device buffer has to be for some fetch rates
/// of lru.
void print_lru_curve(const Run& run, const std::map<std::string, std::string>& model_of,
                     const std::string& model) {
  std::vector<LruPoint> curve;
  for (const LruPoint& point : run.lru_curve)
    if (model_of.at(point.trace) == model) curve.push_back(point);
  const std::string sizes = buffer_sizes_text(curve);
  if (!sizes.empty()) fmt::print("{}", wrap_columns(sizes + " lru_curve.csv has all sizes."));
}

/// Prints each model separately, because metrics of several models are not averaged.
void print_table(const Run& run, const std::string& out, const std::vector<std::string>& show) {
  std::map<std::string, std::string> model_of;
  std::vector<std::pair<std::string, const RunTrace*>> models;  // each model with its first trace
  for (const RunTrace& trace : run.info.traces) {
    const std::string model = trace.model + " " + trace.weights_xxh3;
    model_of[trace.name] = model;
    if (std::ranges::none_of(models, [&](const auto& other) { return other.first == model; }))
      models.emplace_back(model, &trace);
  }
  const bool evicts = std::ranges::any_of(run.rows, [](const ResultRow& row) {
    return row.policy != "full" && !is_oracle(row.policy) && row.budget != "all";
  });
  if (!evicts) fmt::print("{}", text_without_eviction(run));
  if (!evicts) models.clear();
  std::string budget;
  for (const auto& [model, trace] : models) {
    std::vector<ResultRow> rows;
    for (const ResultRow& row : run.rows)
      if (model_of[row.trace] == model) rows.push_back(row);
    if (models.size() > 1) fmt::print("== {} ==\n", model);
    budget = print_metrics(*trace, rows, show, scored_tokens(run.info, rows));
    print_exempt(run, *trace);
    if (const std::string windows = trace->windows_text(); !windows.empty())
      fmt::print("{}\n", windows);
    print_lru_curve(run, model_of, model);
  }
  const auto bounds = [](const ResultRow& row) { return row.policy == kOracleTopk; };
  if (evicts && !show.empty() && std::ranges::any_of(run.rows, bounds))
    fmt::print("oracle_topk is a bound for recall and misses only, so its errors are not shown.\n");
  fmt::print("{}: {} values of all metrics (--show all prints them)\n", out, run.rows.size());
  // Not for runs with refetch, because an engine that reads a policy.json evicts for good.
  if (!budget.empty() && models.size() == 1 && run.info.refetch.empty())
    fmt::print("Next: kvlab deploy {} --budget {} --out policy.json\n", out, budget);
  fmt::print("Next: kvlab report {} --out report.html\n", out);
}

ordered_json to_json(const ResultRow& row) {
  ordered_json json{{"trace", row.trace},
                    {"policy", row.policy},
                    {"params", row.params},
                    {"budget", row.budget},
                    {"budget_tokens", row.budget_tokens},
                    {"prefill", row.prefill},
                    {"positions", row.positions},
                    {"seed", row.seed},
                    {"metric", row.metric},
                    {"value", row.value},
                    {"stderr", nullptr},
                    {"count", row.count}};
  if (!std::isnan(row.standard_error)) json["stderr"] = row.standard_error;
  return json;
}

void print_json(const Run& run, const std::string& out) {
  ordered_json results = ordered_json::array();
  for (const ResultRow& row : run.rows)
    if (row.layer < 0) results.push_back(to_json(row));
  ordered_json recommendations = ordered_json::array();
  const auto one_model = [&](const RunTrace& trace) {
    return trace.is_of_model(run.info.traces.front());
  };
  if (std::ranges::all_of(run.info.traces, one_model))
    recommendations = recommendations_json(
        recommendations_of(MetricTable(run.rows), *find_metric(best_metric(run.rows)),
                           scored_tokens(run.info, run.rows), std::string(kReplayNote)));
  kvlab::print_json({{"run", out},
                     {"hash", run.hash},
                     {"recommendations", std::move(recommendations)},
                     {"results", std::move(results)}});
}

/// Opens the traces and calls check_budgets() for them.
void check_budgets(ReplayRequest& request) {
  std::vector<TraceReader> traces;
  for (const std::string& path : request.traces) traces.push_back(TraceReader::open(path));
  std::vector<const TraceReader*> pointers;
  for (const TraceReader& trace : traces) pointers.push_back(&trace);
  kvlab::check_budgets(request, pointers);
}

/// The checked request of a replay, with its policies compiled and its weights loaded.
ReplayRequest load_request(const Request& given, const ProcessGroup& group) {
  const bool on_device = given.common.device == Device::cuda;
  if (on_device && group.size() > 1)
    throw std::invalid_argument(
        "--device: cuda supports one process only; under mpirun use --device cpu");
  check_together(given);
  ReplayRequest request = given.replay;
  ReplayOptions& options = request.options;
  if (group.leads()) {
    refuse_existing(given.out, "--out");
    refuse_missing_parent(given.out, "--out");
    options.progress = progress_bar("replay");
    request.notice = report_omissions("replay");
  }
  const unsigned sharing = given.shares_cores ? static_cast<unsigned>(group.host_size()) : 1;
  options.threads = std::max(1u, given.common.threads / sharing);
  if (!given.layers.empty()) options.layers = parse_layers(given.layers);
  if (!given.model.empty())
    options.output =
        std::make_shared<const OutputProjections>(read_output_projections(given.model));
  CacheOptions caches = given.caches;
  caches.sweep = sweep_with(std::move(caches.sweep), options.refetch);
  request.sweep =
      sweep_of(caches, compiled_policies(caches, given.common), request.notice, replay_oracles());
  check_budgets(request);
  if (given.references)
    request.sweep = add_references(std::move(request.sweep), options.refetch.has_value());
  if (on_device) request.device = cuda_replayer();
  options.elsewhere = request.device.get();
  return request;
}

int run(const Request& given) {
  const auto group = join_process_group();
  std::optional<ReplayRequest> request;
  std::optional<Run> result;
  if (do_together(*group, [&] { request = load_request(given, *group); }))
    result = replay_to(*request, given.out, *group);
  if (!result) return 0;  // only the first process prints
  if (given.common.json)
    print_json(*result, given.out);
  else
    print_table(*result, given.out, given.show);
  return 0;
}

}  // namespace

Command replay_command() {
  return {.name = "replay",
          .summary = "replays traces through many policies and budgets at once",
          .usage = "--trace TRACE... --policy LIST --budget LIST --out RUN [options]",
          .example =
              "kvlab replay --trace trace --policy window,sink,lru,h2o:recent=25% "
              "--budget 64,128,20% --out run",
          .prepare = make_prepare(add_options, check, run)};
}

}  // namespace kvlab
