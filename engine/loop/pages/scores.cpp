#include "engine/loop/pages/scores.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <set>

#include "engine/loop/eval/score.hpp"
#include "sim/report/figure.hpp"
#include "sim/report/html.hpp"
#include "sim/report/page.hpp"
#include "sim/run/results.hpp"
#include "sim/run/run.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"
#include "traces/base/json_fields.hpp"
#include "traces/base/text.hpp"

namespace kvlab {
namespace {

using nlohmann::json;

constexpr std::string_view kAllTexts = "all";  // in eval.csv
constexpr std::size_t kMostScoresBytes = std::size_t{256} << 20;

constexpr std::array kEvalMetrics{MetricInfo{"kl", "KL, nats", false, true},
                                  MetricInfo{"kl_p50", "KL, median", false, true},
                                  MetricInfo{"kl_p90", "KL, 90th percentile", false, true},
                                  MetricInfo{"kl_p99", "KL, 99th percentile", false, true},
                                  MetricInfo{"nll", "−ln p of the text", false, true},
                                  MetricInfo{"perplexity", "perplexity", false, true},
                                  MetricInfo{"top1_agreement", "top-1 agreement", true, true}};
constexpr std::array kTaskMetrics{
    MetricInfo{"exact_match", "right answers, share", true, true},
    MetricInfo{"log_likelihood", "log-likelihood of the right answer, nats", true, true},
    MetricInfo{"log_likelihood_change", "its change from the first configuration", true, true},
    MetricInfo{"lost", "right answers lost, share", false, true},
    MetricInfo{"gained", "right answers gained, share", true, true}};

/// Those of `known` that a row has.
std::vector<MetricInfo> present(std::span<const MetricInfo> known,
                                const std::vector<ResultRow>& rows) {
  std::vector<MetricInfo> metrics;
  for (const MetricInfo& metric : known)
    if (std::ranges::any_of(
            rows, [&](const ResultRow& row) { return row.layer < 0 && row.metric == metric.name; }))
      metrics.push_back(metric);
  return metrics;
}

std::string text_of(const json& value) {
  return value.is_string() ? value.get<std::string>() : "?";
}

ScoreSet scores_of_run(const std::filesystem::path& folder) {
  const Run run = load_run(folder);
  ScoreSet set{.kind = "replay",
               .headline = std::string(best_metric(run.rows)),
               .note = "Open loop: queries and keys come from the full-cache run."};
  std::map<std::string, const RunTrace*> traces;
  for (const RunTrace& trace : run.info.traces) {
    traces[trace.name] = &trace;
    set.sequences += (set.sequences.empty() ? "" : ", ") + trace.name;
  }
  std::map<std::string, std::size_t> places;
  for (ResultRow row : run.rows) {
    const RunTrace& trace = *traces.at(row.trace);
    const auto [place, added] =
        places.try_emplace(trace.weights_xxh3 + trace.model, set.groups.size());
    if (added) set.groups.push_back({trace.model, {}});
    row.trace += " " + trace.hash;  // what is of one sequence is paired, whatever it is called
    set.groups[place->second].rows.push_back(std::move(row));
  }
  set.metrics = present(all_metrics(), run.rows);
  return set;
}

ScoreSet scores_of_eval(const std::filesystem::path& folder) {
  const std::string file = (folder / kEvalJson).string(), csv = (folder / kEvalCsv).string();
  const json top = parse_json(read_text_file(file, kMostScoresBytes), file);
  const JsonFields fields(top, file);
  fields.check_format(kEvalFormat);
  const std::string model = fields.text("model");
  ScoreSet set{.kind = "evaluation",
               .groups = {{model, {}}},
               .note = "Closed loop, teacher-forced: evictions change what later layers see."};
  for (const json& text : fields.list("texts"))
    set.sequences += (set.sequences.empty() ? "" : ", ") + printable(text_of(text));
  auto rows = parse_score_rows(read_text_file(csv, kMostScoresBytes), csv);
  if (const auto blocks = folder / kEvalBlocksCsv; std::filesystem::exists(blocks))
    parse_blocks_csv(read_text_file(blocks, kMostScoresBytes), blocks.string(), rows);
  // What is known by text is taken by text, and paired by it; the rest is of all texts together.
  std::set<std::string> by_text;
  for (const ResultRow& row : rows)
    if (row.trace != kAllTexts) by_text.insert(row.metric);
  for (ResultRow& row : rows) {
    if (row.trace == kAllTexts && by_text.contains(row.metric)) continue;
    if (row.trace == kAllTexts) row.trace = set.sequences;
    set.groups.front().rows.push_back(std::move(row));
  }
  set.metrics = present(kEvalMetrics, set.groups.front().rows);
  set.headline = set.metrics.empty() ? "kl" : set.metrics.front().name;
  return set;
}

/// The number in "64" and "20%": where the budget stands on an axis.
std::uint32_t number_in(const std::string& text) {
  std::uint32_t number = 0;
  const std::size_t first = std::min(text.find_first_of("0123456789"), text.size());
  std::from_chars(text.data() + first, text.data() + text.size(), number);
  return std::max(number, 1u);
}

/// What a row of task.csv or answers.csv is of: configuration, mode, length, depth.
std::string task_key(const CsvRecord& record, const std::string& words, const std::string& depth,
                     std::string_view metric) {
  std::string key = fmt::format("{},{},{}", words, depth, metric);
  for (const char* column : {"policy", "params", "budget", "prefill", "positions", "seed", "mode"})
    key += "," + record.text(column);
  return key;
}

/// Each draw's answer, of every place and of all together, by task_key(): what figures are paired
/// by. Draws come in one order for every configuration.
std::map<std::string, std::vector<double>> answers_in(const std::filesystem::path& folder) {
  std::map<std::string, std::vector<double>> answers;
  const std::string file = (folder / "answers.csv").string();
  if (!std::filesystem::exists(file)) return answers;
  read_records(read_text_file(file, kMostScoresBytes), file, [&](const CsvRecord& own) {
    for (const std::string& words : {own.text("words"), std::string("all")})
      for (const std::string& depth : {own.text("depth"), std::string("all")})
        for (const auto& [metric, column] :
             {std::pair("exact_match", "right"), std::pair("log_likelihood", "log_likelihood")})
          answers[task_key(own, words, depth, metric)].push_back(own.number<double>(column));
  });
  return answers;
}

ScoreSet scores_of_task(const std::filesystem::path& folder) {
  const std::string file = (folder / kTaskJson).string(), csv = (folder / "task.csv").string();
  const json top = parse_json(read_text_file(file, kMostScoresBytes), file);
  const JsonFields fields(top, file);
  const std::string model = fields.text("model");
  ScoreSet set{.kind = "task",
               .headline = "exact_match",
               .sequences = fields.text("task"),
               .note = "Answers of the model under each cache. Shares with their 95% intervals."};
  const auto answers = answers_in(folder);
  std::map<std::string, std::size_t> places;
  read_records(read_text_file(csv, kMostScoresBytes), csv, [&](const CsvRecord& own) {
    const std::string &words = own.text("words"), &depth = own.text("depth");
    ResultRow row = score_row(own, "task");
    row.budget_tokens = number_in(row.budget);
    if (const auto found = answers.find(task_key(own, words, depth, row.metric));
        found != answers.end())
      row.blocks = found->second;
    const std::string name = fmt::format("{}, {}, {}, {}", model, own.text("mode"),
                                         words == "all" ? "all lengths" : words + " words",
                                         depth == "all" ? "all depths" : "depth " + depth);
    const auto [place, added] = places.try_emplace(name, set.groups.size());
    if (added) set.groups.push_back({name, {}});
    set.groups[place->second].rows.push_back(std::move(row));
  });
  if (set.groups.empty()) throw std::runtime_error(csv + ": holds no rows");
  std::ranges::stable_sort(set.groups, {}, [](const SequenceGroup& group) {
    return !group.name.ends_with("all lengths, all depths");
  });
  set.metrics = present(kTaskMetrics, set.groups.front().rows);
  return set;
}

std::vector<std::size_t> evicting(const Figures& figures) {
  std::vector<std::size_t> drawn;
  for (std::size_t s = 0; s < figures.series().size(); ++s)
    if (!figures.series()[s].is_full() && figures.series()[s].policy != kOracleTopk)
      drawn.push_back(s);
  return drawn;
}

}  // namespace

ScoreSet load_scores(const std::filesystem::path& folder) {
  ScoreSet set;
  if (std::filesystem::exists(folder / "run.json"))
    set = scores_of_run(folder);
  else if (std::filesystem::exists(folder / kEvalJson))
    set = scores_of_eval(folder);
  else if (std::filesystem::exists(folder / kTaskJson))
    set = scores_of_task(folder);
  else
    throw std::runtime_error(
        fmt::format("{}: holds no run.json, eval.json or task.json; it should be a directory made "
                    "by `kvlab replay`, `eval --out` or `task --out`",
                    folder.string()));
  if (set.metrics.empty())
    throw std::runtime_error(fmt::format(
        "{}: holds no figure that this version knows; rows of {} are expected, for instance",
        folder.string(), set.headline));
  const auto whole = (folder / "").lexically_normal().parent_path();
  set.name = whole.filename().string();
  return set;
}

std::vector<ResultRow> all_rows(const ScoreSet& set) {
  std::vector<ResultRow> rows;
  for (const SequenceGroup& group : set.groups)
    rows.insert(rows.end(), group.rows.begin(), group.rows.end());
  return rows;
}

std::vector<Figure> figures_of(const ScoreSet& set) {
  const Figures figures(set.groups.front().rows);
  std::vector<Figure> found;
  for (const MetricInfo& metric : set.metrics) {
    if (metric.name == set.headline && !metric.higher_is_better)
      found.insert(found.begin(), frontier_figure(figures, evicting(figures), metric));
    found.push_back(curve_figure(figures, evicting(figures), metric));
  }
  for (Figure& figure : found) figure.title += ", " + set.groups.front().name;
  return found;
}

Explorer explorer_of(const ScoreSet& set, std::string_view heading) {
  const std::vector<ResultRow> rows = all_rows(set);
  const Figures figures(rows);
  const auto styles = styles_of(figures.series());
  DatasetOptions options{.headline = set.headline, .metrics = set.metrics};
  if (!figures.budgets().empty())
    options.budget = figures.budgets()[(figures.budgets().size() - 1) / 2].text;
  for (const Series& series : figures.series())
    options.drawn.push_back(series.policy != kOracleTopk);
  auto data = dataset_of(figures, styles, set.groups, options);
  data["winner"] = nullptr;
  const auto metric = std::ranges::find(set.metrics, set.headline, &MetricInfo::name);
  const Figures first(set.groups.front().rows);
  if (metric != set.metrics.end())
    if (const auto ranking = rank_policies(first, options.budget, *metric); !ranking.empty())
      for (std::size_t s = 0; s < figures.series().size(); ++s)
        if (figures.series()[s].label ==
            first.series()[ranking.standings[ranking.winner].series].label)
          data["winner"] = s;
  if (set.kind == "task") data["x_title"] = "budget, as asked";
  Explorer explorer;
  if (metric != set.metrics.end() && !metric->higher_is_better)
    explorer.sections = frontier_section(frontier_figure(first, evicting(first), *metric), data);
  explorer.sections += html_open_section("explore", heading, escape(set.note));
  if (data["heads"] > 0)
    explorer.sections +=
        html_open_section("heads", "By layer and head", escape(data["note"].get<std::string>()));
  explorer.data = std::move(data);
  return explorer;
}

}  // namespace kvlab
