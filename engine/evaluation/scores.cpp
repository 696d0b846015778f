#include "engine/evaluation/scores.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <set>

#include "engine/evaluation/eval/score.hpp"
#include "sim/report/figure.hpp"
#include "sim/report/recommendation.hpp"
#include "sim/run/results.hpp"
#include "sim/run/run.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"
#include "traces/base/json_fields.hpp"
#include "traces/base/numeric/nan.hpp"
#include "traces/base/old_keys.hpp"
#include "traces/base/text.hpp"

namespace kvlab {
namespace {

using nlohmann::json;

constexpr std::string_view kAllTexts = "all";  // the text `all` in eval.csv
constexpr std::size_t kMaxScoresBytes = std::size_t{256} << 20;

constexpr std::array kEvalMetrics{
    MetricInfo{"acceptance", "acceptance of drafts", true, true},
    MetricInfo{"tokens_per_verification", "tokens per verification", true, true},
    MetricInfo{"kl", "KL, nats", false, true},
    MetricInfo{"kl_p50", "KL, median", false, true},
    MetricInfo{"kl_p90", "KL, 90th percentile", false, true},
    MetricInfo{"kl_p99", "KL, 99th percentile", false, true},
    MetricInfo{"nll", "−ln p of the text", false, true},
    MetricInfo{"perplexity", "perplexity", false, true},
    MetricInfo{"top1_agreement", "top-1 agreement", true, true}};
constexpr std::array kTaskMetrics{
    MetricInfo{"string_match", "answers found, share", true, true},
    MetricInfo{"exact_match", "right answers, share", true, true},
    MetricInfo{"log_likelihood", "log-likelihood of the right answer, nats", true, true},
    MetricInfo{"log_likelihood_change", "its change from the first configuration", true, true},
    MetricInfo{"lost", "right answers lost, share", false, true},
    MetricInfo{"gained", "right answers gained, share", true, true}};

/// The metrics of `known` that occur in a row.
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

/// Which queries and layers a replay measured.
std::string scored_by(const RunInfo& info) {
  const std::string_view queries =
      info.queries == Queries::decode ? "queries of decoded tokens" : "all queries";
  if (info.layers.empty()) return fmt::format("{}, all layers", queries);
  return fmt::format("{}, layers {}", queries, fmt::join(info.layers, ","));
}

ScoreSet scores_of_run(const std::filesystem::path& folder) {
  const Run run = load_run(folder);
  ScoreSet set{.kind = "replay",
               .headline = std::string(best_metric(run.rows)),
               .scored = scored_by(run.info),
               .note = "Offline replay: queries and keys come from the full-cache run."};
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
    row.trace += " " + trace.hash;
    // Rows are paired by this text: those of one sequence, over the same queries and layers.
    row.text = fmt::format("{}, {}", trace.hash, set.scored);
    set.groups[place->second].rows.push_back(std::move(row));
  }
  set.metrics = present(all_metrics(), run.rows);
  return set;
}

/// Adds the recommendations of eval.json, each with the series of its candidates.
void add_recommendations(ScoreSet& set, const JsonFields& fields) {
  std::vector<Series> configurations;
  for (const JsonFields& one : fields.objects("configurations"))
    configurations.push_back({.policy = one.text("policy"),
                              .params = one.text("params"),
                              .prefill = one.text("prefill"),
                              .positions = one.text("positions"),
                              .seed = one.whole("seed")});
  set.recommendations = recommendations_from(fields, "recommendations");
  for (const JsonFields& one : fields.objects("recommendations")) {
    set.recommended.emplace_back();
    for (const json& index : one.list("configurations")) {
      if (!index.is_number_unsigned() || index.get<std::uint64_t>() >= configurations.size())
        throw std::runtime_error(fmt::format("{}: configurations: {}; it should be below {}",
                                             one.where(), index.dump(), configurations.size()));
      set.recommended.back().push_back(configurations[index.get<std::size_t>()]);
    }
    if (set.recommended.back().size() !=
        set.recommendations[set.recommended.size() - 1].candidates.size())
      throw std::runtime_error(one.where() +
                               ": configurations: one for each candidate is expected");
  }
}

ScoreSet scores_of_eval(const std::filesystem::path& folder) {
  const std::string file = (folder / kEvalJson).string(), csv = (folder / kEvalCsv).string();
  const auto top =
      std::make_shared<const json>(parse_result_json(read_text_file(file, kMaxScoresBytes), file));
  const JsonFields fields(*top, file);
  fields.check_format(kEvalFormat);
  const std::string model = fields.text("model");
  ScoreSet set{.kind = "evaluation",
               .groups = {{model, {}}},
               .note =
                   "End-to-end evaluation with teacher forcing: evictions change what later "
                   "layers see.",
               .file = top,
               .path = file};
  set.scored = fmt::format("{} tokens", fields.whole("tokens"));
  if (fields.has("queries")) set.scored += fmt::format(", queries {}", fields.text("queries"));
  for (const json& text : fields.list("texts"))
    set.sequences += (set.sequences.empty() ? "" : ", ") + printable(text_of(text));
  auto rows = parse_score_rows(read_text_file(csv, kMaxScoresBytes), csv);
  if (const auto blocks = folder / kEvalBlocksCsv; std::filesystem::exists(blocks))
    parse_blocks_csv(read_text_file(blocks, kMaxScoresBytes), blocks.string(), rows);
  // Metrics that are known for each text are read by text and compared in pairs by text. Other
  // metrics are read for all texts together.
  std::set<std::string> by_text;
  for (const ResultRow& row : rows)
    if (row.trace != kAllTexts) by_text.insert(row.metric);
  for (ResultRow& row : rows) {
    if (row.trace == kAllTexts && by_text.contains(row.metric)) continue;
    if (row.trace == kAllTexts) row.trace = set.sequences;
    // Rows are paired by this text. Evaluations that scored different numbers of tokens of a text
    // scored different tokens.
    row.text = fmt::format("{}, {} tokens", row.trace, row.count);
    if (fields.has("queries")) row.text += ", " + fields.text("queries");
    set.groups.front().rows.push_back(std::move(row));
  }
  if (fields.has("recommendations")) add_recommendations(set, fields);
  set.metrics = present(kEvalMetrics, set.groups.front().rows);
  set.headline = set.metrics.empty() ? "kl" : set.metrics.front().name;
  return set;
}

/// The number in "64" or "20%", which is the budget's position on an axis.
std::uint32_t number_in(const std::string& text) {
  std::uint32_t number = 0;
  const std::size_t first = std::min(text.find_first_of("0123456789"), text.size());
  std::from_chars(text.data() + first, text.data() + text.size(), number);
  return std::max(number, 1u);
}

/// The key of a row of task.csv or answers.csv, made of configuration, mode, task, length and
/// depth.
std::string task_key(const CsvRecord& record, const std::string& task, const std::string& words,
                     const std::string& depth, std::string_view metric) {
  std::string key = fmt::format("{},{},{},{}", task, words, depth, metric);
  for (const char* column : {"policy", "params", "budget", "prefill", "positions", "seed", "mode"})
    key += "," + record.text(column);
  return key;
}

/// Maps task_key() to the scores of the samples' answers. There are entries for each task, length
/// and depth, and for all of them together. Metrics are compared in pairs by these scores, because
/// all configurations have the samples in the same order. `run_task`: the name of the whole run.
std::map<std::string, std::vector<double>> answers_in(const std::filesystem::path& folder,
                                                      const std::string& run_task) {
  std::map<std::string, std::vector<double>> answers;
  const std::string file = (folder / "answers.csv").string();
  if (!std::filesystem::exists(file)) return answers;
  read_records(read_text_file(file, kMaxScoresBytes), file, [&](const CsvRecord& own) {
    for (const std::string& task : std::set{own.text("task"), run_task})
      for (const std::string& words : std::set{own.text("words"), std::string("all")})
        for (const std::string& depth : std::set{own.text("depth"), std::string("all")})
          for (const auto& [metric, column] :
               {std::pair("string_match", "found"), std::pair("exact_match", "right"),
                std::pair("log_likelihood", "log_likelihood")})
            if (own.has(column))
              answers[task_key(own, task, words, depth, metric)].push_back(
                  own.number<double>(column));
  });
  return answers;
}

/// Whether the full cache has a value above 0 for the metric. If it answers no question right,
/// policies can only be compared by log p.
bool full_cache_scores(const std::vector<ResultRow>& rows, const std::string& metric) {
  return std::ranges::any_of(rows, [&](const ResultRow& row) {
    return row.policy == "full" && row.metric == metric && row.value > 0;
  });
}

/// The value of a key of task.json on which the samples depend, as text.
std::string samples_key(const json& top, const char* key) {
  return top.contains(key) ? " " + top[key].dump() : "";
}

ScoreSet scores_of_task(const std::filesystem::path& folder) {
  const std::string file = (folder / kTaskJson).string(), csv = (folder / "task.csv").string();
  const auto top =
      std::make_shared<const json>(parse_result_json(read_text_file(file, kMaxScoresBytes), file));
  const JsonFields fields(*top, file);
  const std::string model = fields.text("model");
  ScoreSet set{.kind = "task",
               .sequences = fields.text("task"),
               .note = "Answers of the model with each cache.",
               .file = top,
               .path = file};
  const std::string run_task = fields.text("task");
  set.scored =
      fmt::format("seed{}, samples{}", samples_key(*top, "seed"), samples_key(*top, "samples"));
  const std::string unit = top->contains("tasks") ? " tokens" : " words";  // RULER counts tokens
  const auto answers = answers_in(folder, run_task);
  std::map<std::string, std::size_t> places;
  read_records(read_text_file(csv, kMaxScoresBytes), csv, [&](const CsvRecord& own) {
    const std::string &task = own.text("task"), &words = own.text("words"),
                      &depth = own.text("depth");
    ResultRow row = score_row(own, "task");
    row.budget_tokens = number_in(row.budget);
    if (const auto found = answers.find(task_key(own, task, words, depth, row.metric));
        found != answers.end())
      row.blocks = found->second;
    // Rows are paired by this text: those of the same samples.
    row.text = set.scored + samples_key(*top, "text_xxh3") + samples_key(*top, "word_lists_xxh3");
    if (task == run_task) row.text += samples_key(*top, "tasks");
    if (words == "all") row.text += samples_key(*top, "words");
    if (depth == "all") row.text += samples_key(*top, "depths");
    const std::string name = fmt::format(
        "{}, {}, {}, {}{}", model, own.text("mode"), words == "all" ? "all lengths" : words + unit,
        depth == "all" ? "all depths" : "depth " + depth, task == run_task ? "" : ", " + task);
    const auto [place, added] = places.try_emplace(name, set.groups.size());
    if (added) set.groups.push_back({name, {}});
    set.groups[place->second].rows.push_back(std::move(row));
  });
  if (set.groups.empty()) throw std::runtime_error(csv + ": holds no rows");
  std::ranges::stable_sort(set.groups, {}, [](const SequenceGroup& group) {
    return !group.name.ends_with("all lengths, all depths");
  });
  const std::vector<ResultRow>& all = set.groups.front().rows;
  set.metrics = present(kTaskMetrics, all);
  set.headline = set.metrics.front().name;
  if (!full_cache_scores(all, set.headline)) set.headline = "log_likelihood";
  return set;
}

std::optional<std::size_t> find_series(const MetricTable& metric_table, const Series& like) {
  for (std::size_t s = 0; s < metric_table.series().size(); ++s)
    if (const Series& one = metric_table.series()[s];
        one.policy == like.policy && one.params == like.params && one.prefill == like.prefill &&
        one.positions == like.positions && one.seed == like.seed)
      return s;
  return std::nullopt;
}

/// The tables of the recommendations that are stored in an evaluation's results.
RankedTables decided_tables(const ScoreSet& set, const MetricTable& metric_table) {
  RankedTables tables;
  for (std::size_t b = 0; b < set.recommended.size(); ++b) {
    const Recommendation& made = set.recommendations[b];
    RankedTable& table = tables[made.scope.budget];
    const auto add = [&](std::size_t c, const Difference& from_lowest, bool over) {
      const auto s = find_series(metric_table, set.recommended[b][c]);
      if (s) table.rows.push_back({*s, from_lowest, over});
      if (s && c == made.choice) table.choice = *s;
    };
    for (std::size_t i = 0; i < made.order.size(); ++i)
      add(made.order[i], made.from_lowest[i], false);
    for (const std::size_t c : made.over_budget) add(c, {.mean = kNaN}, true);
  }
  return tables;
}

/// The series that a figure of the metric shows: the policies that evict, and the oracles that are
/// meaningful for the metric.
std::vector<std::size_t> drawn_for(const MetricTable& metric_table, const MetricInfo& metric) {
  std::vector<std::size_t> drawn;
  for (std::size_t s = 0; s < metric_table.series().size(); ++s)
    if (const Series& one = metric_table.series()[s];
        !one.is_full() && one.policy != kOracleTopk &&
        (!one.is_oracle() || is_informative(one, metric.name)))
      drawn.push_back(s);
  return drawn;
}

/// The colour of each candidate, by name.
ColourOf colours_for(const ScoreSet& set) {
  const MetricTable metric_table(set.groups.front().rows);
  const auto styles = styles_of(metric_table.series());
  std::map<std::string, std::string> colours;
  for (std::size_t s = 0; s < styles.size(); ++s)
    colours[metric_table.series()[s].label] = styles[s].colour;
  for (std::size_t b = 0; b < set.recommended.size(); ++b)
    for (std::size_t c = 0; c < set.recommended[b].size(); ++c)
      if (const auto s = find_series(metric_table, set.recommended[b][c]))
        colours[set.recommendations[b].candidates[c].name] = styles[*s].colour;
  return [colours](const std::string& name) {
    const auto found = colours.find(name);
    return found == colours.end() ? std::string() : found->second;
  };
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
        "{}: holds no metric that this version knows; rows of a metric such as {} are expected",
        folder.string(), set.headline));
  const auto whole = (folder / "").lexically_normal().parent_path();
  set.name = whole.filename().string();
  return set;
}

std::vector<Recommendation> recommendations_for(const ScoreSet& set, const MetricInfo& metric) {
  if (!set.recommendations.empty() && metric.name == set.headline) return set.recommendations;
  const MetricTable metric_table(set.groups.front().rows);
  auto made = recommendations_of(metric_table, metric, 0, set.note);
  if (set.kind == "task")
    for (Recommendation& one : made) {
      for (const ResultRow& row : set.groups.front().rows)
        if (row.metric == metric.name) one.scope.samples = row.count;
      // A row of a task has no number of tokens for a share of the prompt or for bytes.
      if (one.scope.budget.find_first_not_of("0123456789") != std::string::npos)
        one.scope.filled.clear();
    }
  return made;
}

std::vector<ResultRow> all_rows(const ScoreSet& set) {
  std::vector<ResultRow> rows;
  for (const SequenceGroup& group : set.groups)
    rows.insert(rows.end(), group.rows.begin(), group.rows.end());
  return rows;
}

std::vector<Figure> figures_of(const ScoreSet& set) {
  const MetricTable metric_table(set.groups.front().rows);
  std::vector<Figure> found;
  for (const MetricInfo& metric : set.metrics) {
    if (metric.name == set.headline && !metric.higher_is_better)
      found.insert(found.begin(),
                   frontier_figure(metric_table, drawn_for(metric_table, metric), metric));
    found.push_back(curve_figure(metric_table, drawn_for(metric_table, metric), metric));
  }
  for (Figure& figure : found) figure.title += ", " + set.groups.front().name;
  return found;
}

nlohmann::ordered_json explorer_data(const ScoreSet& set) {
  const std::vector<ResultRow> rows = all_rows(set);
  const MetricTable metric_table(rows), first(set.groups.front().rows);
  const auto metric = std::ranges::find(set.metrics, set.headline, &MetricInfo::name);
  DatasetOptions options{.headline = set.headline,
                         .decided = decided_tables(set, metric_table),
                         .metrics = set.metrics};
  const auto made = metric == set.metrics.end() ? std::vector<Recommendation>{}
                                                : recommendations_for(set, *metric);
  if (!made.empty()) options.budget = made[decisive_budget(made)].scope.budget;
  for (const Series& series : metric_table.series())
    options.drawn.push_back(series.policy != kOracleTopk);
  auto data = dataset_of(metric_table, styles_of(metric_table.series()), set.groups, options);
  data["description"] = set.note;
  data["recommendations"].push_back(page_json(made, colours_for(set)));
  data["winner"] = nullptr;
  if (!made.empty())
    if (const std::size_t choice =
            data["ranking"][0][set.headline][data["budget"].get<std::size_t>()]["choice"]
                .get<std::size_t>();
        choice < metric_table.series().size())
      data["winner"] = choice;
  if (set.kind == "task") data["x_title"] = "budget, as requested";
  if (metric != set.metrics.end() && !metric->higher_is_better)
    add_figures(data, {frontier_figure(first, drawn_for(first, *metric), *metric)});
  return data;
}

}  // namespace kvlab
