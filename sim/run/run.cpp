#include "sim/run/run.hpp"
#include "policies/old_names.hpp"

#include <fmt/format.h>
#include <algorithm>
#include <map>
#include <stdexcept>

#include "sim/budgets/budget_file.hpp"
#include "sim/head_view.hpp"
#include "sim/live_counts.hpp"
#include "sim/report/recommendation.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"
#include "traces/base/json_fields.hpp"
#include "traces/base/old_keys.hpp"
#include "traces/manifest.hpp"
#include "traces/selections.hpp"

namespace kvlab {
namespace {

using nlohmann::json;

constexpr std::size_t kMaxCsvBytes = std::size_t{4} << 30;
constexpr std::size_t kMaxJsonBytes = std::size_t{256} << 20;

json to_json(const RunTrace& trace) {
  json top{{"name", trace.name},
           {"path", trace.path},
           {"hash", trace.hash},
           {"tokens", trace.tokens},
           {"prompt_tokens", trace.prompt_tokens},
           {"model",
            {{"name", trace.model},
             {"dtype", trace.dtype},
             {"layers", trace.layers},
             {"query_heads", trace.query_heads},
             {"kv_heads", trace.kv_heads},
             {"head_size", trace.head_size},
             {"weights_xxh3", trace.weights_xxh3},
             {"tokenizer_xxh3", trace.tokenizer_xxh3}}},
           {"capture", *trace.capture}};
  if (!trace.same_text_as.empty()) top["same_text_as"] = trace.same_text_as;
  if (!trace.numbers.empty()) top["layer_numbers"] = trace.numbers;
  if (trace.window_layers > 0)
    top["window_layers"] = {{"layers", trace.window_layers},
                            {"kv_bytes_mean", trace.window_mean_bytes},
                            {"kv_bytes_peak", trace.window_peak_bytes}};
  return top;
}

std::vector<std::uint32_t> whole_numbers(const JsonFields& fields, std::string_view key) {
  std::vector<std::uint32_t> numbers;
  for (const json& entry : fields.list(key))
    numbers.push_back(
        whole_number(entry, fmt::format("{}: {}[{}]", fields.where(), key, numbers.size())));
  return numbers;
}

RunTrace trace_from(const JsonFields& fields) {
  const JsonFields model = fields.object("model");
  RunTrace trace{.name = fields.text("name"),
                 .path = fields.text("path"),
                 .hash = fields.text("hash"),
                 .tokens = fields.whole32("tokens"),
                 .prompt_tokens = fields.whole32("prompt_tokens"),
                 .model = model.text("name"),
                 .dtype = model.text("dtype"),
                 .layers = model.whole32("layers", kMaxLayers),
                 .query_heads = model.whole32("query_heads", kMaxHeads),
                 .kv_heads = model.whole32("kv_heads", kMaxHeads),
                 .head_size = model.whole32("head_size"),
                 .weights_xxh3 = model.text("weights_xxh3"),
                 .tokenizer_xxh3 = model.text("tokenizer_xxh3"),
                 .capture = fields.any("capture")};
  if (fields.has("same_text_as")) trace.same_text_as = fields.text("same_text_as");
  if (fields.has("layer_numbers")) {
    trace.numbers = whole_numbers(fields, "layer_numbers");
    if (trace.numbers.size() != trace.layers)
      fields.refuse("layer_numbers", "one for each layer is expected");
  }
  if (fields.has("window_layers")) {
    const JsonFields windows = fields.object("window_layers");
    trace.window_layers = windows.whole32("layers", kMaxLayers);
    trace.window_mean_bytes = windows.number("kv_bytes_mean", 0);
    trace.window_peak_bytes = windows.number("kv_bytes_peak", 0);
  }
  return trace;
}

json to_json(const RunConfig& config) {
  json top{{"policy", config.policy},   {"params", config.params},       {"budget", config.budget},
           {"prefill", config.prefill}, {"positions", config.positions}, {"seed", config.seed}};
  if (!config.budgets.empty()) top["budgets"] = budgets_json(config.budgets);
  return top;
}

RunConfig config_from(const JsonFields& fields) {
  HeadBudgets budgets;
  if (fields.has("budgets"))
    budgets = budget_from_json(fields.list("budgets"), fields.where() + ": budgets").heads;
  return {.policy = std::string(current_name(kOldPolicies, fields.text("policy"))),
          .params = current_params(fields.text("params")),
          .budget = fields.text("budget"),
          .prefill = fields.text("prefill"),
          .positions = fields.text("positions"),
          .seed = fields.whole("seed"),
          .budgets = std::move(budgets)};
}

json to_json(const RunSource& source) {
  return {{"policy", source.policy}, {"path", source.path}, {"xxh3", source.xxh3}};
}

RunSource source_from(const JsonFields& fields) {
  return {
      .policy = fields.text("policy"), .path = fields.text("path"), .xxh3 = fields.text("xxh3")};
}

/// Reads a list of objects. `read` parses one of them.
template <class Read>
auto list_of(const JsonFields& fields, std::string_view key, Read read) {
  std::vector<decltype(read(fields))> entries;
  for (const JsonFields& entry : fields.objects(key)) entries.push_back(read(entry));
  return entries;
}

json to_json(const RunInfo& info) {
  json traces = json::array(), sweep = json::array();
  for (const RunTrace& trace : info.traces) traces.push_back(to_json(trace));
  for (const RunConfig& config : info.sweep) sweep.push_back(to_json(config));
  json layers = "all";
  if (!info.layers.empty()) layers = info.layers;
  json top{{"format", kRunFormat},
           {"kvlab", info.version},
           {"traces", traces},
           {"sweep", sweep},
           {"queries", name_of(info.queries)},
           {"request_threshold", info.threshold},
           {"output_error", info.every_output_error ? "all" : "sample"},
           {"layers", layers}};
  if (!info.refetch.empty()) top["refetch"] = info.refetch;
  if (info.selected_tokens > 0) top["selected_tokens"] = info.selected_tokens;
  if (!info.projections_xxh3.empty()) top["projections_xxh3"] = info.projections_xxh3;
  if (info.sources.size() == 1) top["policy_source"] = to_json(info.sources.front());
  if (info.sources.size() > 1) {
    json sources = json::array();
    for (const RunSource& source : info.sources) sources.push_back(to_json(source));
    top["policy_source"] = std::move(sources);
  }
  for (const RunCentreFile& file : info.centre_files)
    top["centre_files"].push_back({{"path", file.path}, {"xxh3", file.xxh3}});
  return top;
}

/// The recommendation at each budget, by the best metric of the run. Empty for a run of several
/// models.
nlohmann::ordered_json recommendations_json(const RunInfo& info, std::span<const ResultRow> rows) {
  for (const RunTrace& trace : info.traces)
    if (!trace.is_of_model(info.traces.front())) return nlohmann::ordered_json::array();
  return kvlab::recommendations_json(
      recommendations_of(MetricTable(rows), *find_metric(best_metric(rows)),
                         scored_tokens(info, rows), std::string(kReplayNote)));
}

/// The texts of the files whose checksums run.json has. `lru_curve` may be empty.
struct CheckedTexts {
  const std::string &results, &blocks, &lru_curve;
};

std::string run_json(const RunInfo& info, std::span<const ResultRow> rows,
                     const CheckedTexts& texts) {
  json top = to_json(info);
  top["results_xxh3"] = xxh3_hex(texts.results);
  top["blocks_xxh3"] = xxh3_hex(texts.blocks);
  if (!texts.lru_curve.empty()) top["lru_curve_xxh3"] = xxh3_hex(texts.lru_curve);
  top["recommendations"] = recommendations_json(info, rows);
  return json_text(top, 1) + "\n";
}

RunInfo info_from(const JsonFields& fields) {
  RunInfo info;
  info.version = fields.text("kvlab");
  info.traces = list_of(fields, "traces", trace_from);
  info.sweep = list_of(fields, "sweep", config_from);
  try {
    info.queries = parse_queries(fields.text("queries"));
  } catch (const std::invalid_argument& error) {
    throw std::runtime_error(fmt::format("{}: {}", fields.where(), error.what()));
  }
  info.threshold = fields.number("request_threshold");
  const std::string error = fields.text("output_error");
  if (error != "all" && error != "sample")
    throw std::runtime_error(fields.where() + ": key 'output_error' should be sample or all");
  info.every_output_error = error == "all";
  if (fields.any("layers") != json("all")) info.layers = whole_numbers(fields, "layers");
  if (fields.has("refetch")) info.refetch = fields.text("refetch");
  if (fields.has("selected_tokens"))
    info.selected_tokens = fields.size("selected_tokens", kMaxSelected);
  if (fields.has("projections_xxh3")) info.projections_xxh3 = fields.text("projections_xxh3");
  if (fields.has("policy_source") && fields.any("policy_source").is_array())
    info.sources = list_of(fields, "policy_source", source_from);
  else if (fields.has("policy_source"))
    info.sources = {source_from(fields.object("policy_source"))};
  if (fields.has("centre_files"))
    info.centre_files = list_of(fields, "centre_files", [](const JsonFields& file) {
      return RunCentreFile{.path = file.text("path"), .xxh3 = file.text("xxh3")};
    });
  if (info.traces.empty()) throw std::runtime_error(fields.where() + ": key 'traces' is empty");
  return info;
}

json to_json(const KeptSeries& series) {
  json lifetimes = json::array();
  for (const Lifetime& life : series.lifetimes)
    lifetimes.push_back({life.position, life.first_query, life.last_query});
  return {{"policy", series.policy},
          {"params", series.params},
          {"positions", series.positions},
          {"lifetimes", lifetimes}};
}

KeptSeries series_from(const JsonFields& fields) {
  KeptSeries series{std::string(current_name(kOldPolicies, fields.text("policy"))),
                    current_params(fields.text("params")),
                    fields.text("positions"),
                    {}};
  for (const json& entry : fields.list("lifetimes")) {
    const std::string where =
        fmt::format("{}: lifetimes[{}]", fields.where(), series.lifetimes.size());
    if (!entry.is_array() || entry.size() != 3)
      throw std::runtime_error(where + ": should be [position, first query, last query]");
    series.lifetimes.push_back({whole_number(entry[0], where), whole_number(entry[1], where),
                                whole_number(entry[2], where)});
  }
  return series;
}

json to_json(const KeptHead& head) {
  json series = json::array(), attention = json::array();
  for (const KeptSeries& entry : head.series) series.push_back(to_json(entry));
  for (const auto& row : head.attention) {
    json flat = json::array();
    for (const Glance& glance : row) {
      flat.push_back(glance.position);
      flat.push_back(glance.level);
    }
    attention.push_back(std::move(flat));
  }
  return {{"layer", head.layer}, {"head", head.head}, {"series", series}, {"attention", attention}};
}

/// Parses a flat list in which positions and levels alternate.
std::vector<Glance> glances_from(const json& flat, const std::string& where) {
  if (!flat.is_array() || flat.size() % 2 != 0)
    throw std::runtime_error(where + ": should be [position, level, position, level, ...]");
  std::vector<Glance> row;
  for (std::size_t i = 0; i < flat.size(); i += 2)
    row.push_back({whole_number(flat[i], where), whole_number(flat[i + 1], where)});
  return row;
}

KeptHead head_from(const JsonFields& fields) {
  KeptHead head{.layer = fields.whole32("layer"), .head = fields.whole32("head")};
  head.series = list_of(fields, "series", series_from);
  if (!fields.has("attention")) return head;
  for (const json& row : fields.list("attention"))
    head.attention.push_back(
        glances_from(row, fmt::format("{}: attention[{}]", fields.where(), head.attention.size())));
  return head;
}

/// Version of kept.json. Format 1 had only one head, and no attention.
constexpr int kKeptFormat = 2;

std::string kept_json(const Kept& kept) {
  json heads = json::array();
  for (const KeptHead& head : kept.heads) heads.push_back(to_json(head));
  const json top{{"format", kKeptFormat},   {"trace", kept.trace},
                 {"budget", kept.budget},   {"budget_tokens", kept.budget_tokens},
                 {"prefill", kept.prefill}, {"queries", kept.queries},
                 {"ids", kept.ids},         {"heads", heads}};
  return json_text(top, -1) + "\n";
}

Kept read_kept(const JsonFields& fields) {
  fields.check_format(fields.has("heads") ? kKeptFormat : kRunFormat);
  Kept kept;
  kept.trace = fields.text("trace");
  kept.budget = fields.text("budget");
  kept.budget_tokens = fields.whole32("budget_tokens");
  kept.prefill = fields.text("prefill");
  kept.queries = whole_numbers(fields, "queries");
  if (kept.queries.empty() || !std::is_sorted(kept.queries.begin(), kept.queries.end()))
    throw std::runtime_error(fields.where() + ": key 'queries' should hold ascending positions");
  if (!fields.has("heads")) {
    kept.heads.push_back(head_from(fields));
    return kept;
  }
  for (const std::uint32_t id : whole_numbers(fields, "ids"))
    kept.ids.push_back(static_cast<std::int32_t>(id));
  kept.heads = list_of(fields, "heads", head_from);
  for (const KeptHead& head : kept.heads)
    if (!head.attention.empty() && head.attention.size() != kept.queries.size())
      throw std::runtime_error(fields.where() +
                               ": key 'attention' should have a row for each query");
  if (kept.heads.empty())
    throw std::runtime_error(fields.where() + ": key 'heads' should hold at least one");
  return kept;
}

/// Throws if the trace, the layer or the head of a row is not in the run.
void refuse_foreign(const ResultRow& row, const RunInfo& info, const std::string& where) {
  const auto trace = std::ranges::find(info.traces, row.trace, &RunTrace::name);
  if (trace == info.traces.end())
    throw std::runtime_error(fmt::format("{}: a row has trace {}, which run.json does not list",
                                         where, json_quoted(row.trace)));
  const auto& numbers = trace->numbers;
  const bool known =
      row.layer < 0 || (numbers.empty() ? row.layer < static_cast<std::int64_t>(trace->layers)
                                        : std::ranges::find(numbers, row.layer) != numbers.end());
  if (!known || row.head >= static_cast<std::int64_t>(trace->kv_heads))
    throw std::runtime_error(
        fmt::format("{}: a row has layer {}, head {}; trace {} has {} layers of {} KV heads", where,
                    row.layer, row.head, json_quoted(row.trace), trace->layers, trace->kv_heads));
}

constexpr std::string_view kCurveHeader = "trace,budget_tokens,fetch_rate,fetch_bytes";

std::string lru_curve_csv(std::span<const LruPoint> curve) {
  std::string text = fmt::format("{}\n", kCurveHeader);
  for (const LruPoint& point : curve)
    text += fmt::format("{},{},{},{}\n", csv_field(point.trace), point.budget_tokens,
                        point.fetch_rate, point.fetch_bytes);
  return text;
}

std::vector<LruPoint> parse_lru_curve(std::string_view text, std::string_view file) {
  if (!text.starts_with(fmt::format("{}\n", kCurveHeader)))
    throw std::runtime_error(
        fmt::format("{}: line 1: the header should read {}", file, kCurveHeader));
  std::vector<LruPoint> curve;
  read_records(text, file, [&](const CsvRecord& record) {
    curve.push_back({record.text("trace"), record.number<std::uint32_t>("budget_tokens"),
                     record.number<double>("fetch_rate"), record.number<double>("fetch_bytes")});
  });
  return curve;
}

/// Reads a file. Throws if its checksum differs from the one that run.json has under `key`.
std::string read_checked(const std::filesystem::path& path, const JsonFields& info,
                         std::string_view key) {
  std::string text = read_text_file(path, kMaxCsvBytes);
  if (info.text(key) != xxh3_hex(text))
    throw std::runtime_error(fmt::format(
        "{}: was changed after run.json was written (the checksum differs); replay again",
        path.string()));
  return text;
}

}  // namespace

void refuse_several_models(const RunInfo& info, std::string_view what) {
  for (const RunTrace& trace : info.traces)
    if (!trace.is_of_model(info.traces.front()))
      throw std::invalid_argument(
          fmt::format("the run's traces {} and {} come from different models; {} from a run of a "
                      "single model",
                      info.traces.front().name, trace.name, what));
}

RunTrace describe(const TraceReader& trace, const std::string& path) {
  const TraceHeader& header = trace.header();
  const ModelShape& shape = header.shape;
  RunTrace described{.name = last_name(path),
                     .path = path,
                     .hash = trace.hash(),
                     .tokens = trace.tokens(),
                     .prompt_tokens = trace.prompt_tokens(),
                     .model = header.model,
                     .dtype = std::string(torch_name(header.shape.dtype)),
                     .layers = header.shape.layers,
                     .query_heads = header.shape.query_heads,
                     .kv_heads = header.shape.kv_heads,
                     .head_size = header.shape.head_size,
                     .weights_xxh3 = header.weights_xxh3,
                     .tokenizer_xxh3 = header.tokenizer_xxh3,
                     .capture = header.capture};
  for (const std::uint32_t layer : trace.layers_with_window(false))
    described.numbers.push_back(shape.number(layer));
  described.layers = static_cast<std::uint32_t>(described.numbers.size());
  if (shape.numbers.empty() && described.layers == shape.layers) described.numbers.clear();
  CacheShape model{shape.layers, shape.kv_heads, shape.head_size};
  for (std::uint32_t layer = 0; layer < shape.layers; ++layer)
    model.windows.push_back(trace.row(layer).window);
  const Memory memory = memory_of(resolve({}, trace.segments(), 0, model), model);
  described.window_layers = shape.layers - described.layers;
  described.window_mean_bytes = memory.window_mean;
  described.window_peak_bytes = memory.window_peak;
  return described;
}

std::string RunTrace::windows_text() const {
  return kvlab::windows_text(window_layers, window_mean_bytes, window_peak_bytes);
}

std::vector<Lifetime> lifetimes_of(std::span<const KeptSet> sets) {
  std::vector<Lifetime> lifetimes;
  std::map<std::uint32_t, std::uint32_t> alive;  // position -> first query of the current period
  std::uint32_t last_query = 0;
  for (const KeptSet& set : sets) {
    std::map<std::uint32_t, std::uint32_t> still;
    for (const std::uint32_t position : set.positions) {
      const auto before = alive.find(position);
      still[position] = before == alive.end() ? set.query : before->second;
    }
    for (const auto& [position, first] : alive)
      if (!still.contains(position)) lifetimes.push_back({position, first, last_query});
    alive = std::move(still);
    last_query = set.query;
  }
  for (const auto& [position, first] : alive) lifetimes.push_back({position, first, last_query});
  std::sort(lifetimes.begin(), lifetimes.end(), [](const Lifetime& a, const Lifetime& b) {
    return std::tie(a.position, a.first_query) < std::tie(b.position, b.first_query);
  });
  return lifetimes;
}

void name_texts(std::span<ResultRow> rows, const RunInfo& info) {
  std::map<std::string_view, const RunTrace*> traces;
  for (const RunTrace& trace : info.traces) traces[trace.name] = &trace;
  for (ResultRow& row : rows) {
    row.text = traces.at(row.trace)->hash;
    row.counts = traces.at(row.trace)->same_text_as.empty();
  }
}

std::uint64_t scored_tokens(const RunInfo& info, std::span<const ResultRow> rows) {
  std::map<std::string_view, std::uint64_t> queries;  // number of measured queries of each text
  for (const ResultRow& row : rows) {
    // A trace that has only selections has no recall, so `fetch_rate` is counted, too. The count of
    // `fetch_rate` lacks query heads that select nothing, so the largest count is used.
    if (row.layer >= 0 || (row.metric != "recall" && row.metric != "fetch_rate")) continue;
    const auto trace = std::ranges::find(info.traces, row.trace, &RunTrace::name);
    if (trace == info.traces.end() || !trace->same_text_as.empty()) continue;
    const std::uint64_t layers = info.layers.empty() ? trace->layers : info.layers.size();
    std::uint64_t& own = queries[trace->hash];
    own = std::max(own, row.count / std::max<std::uint64_t>(1, layers * trace->query_heads));
  }
  std::uint64_t sum = 0;
  for (const auto& [text, count] : queries) sum += count;
  return sum;
}

json job_of(const RunInfo& info, const std::string& build) {
  json job = to_json(info);
  job["build"] = build;
  for (json& trace : job["traces"]) trace.erase("path");
  return job;
}

void save_run(Run& run, const std::filesystem::path& directory) {
  const std::string results = results_csv(run.rows), blocks = blocks_csv(run.rows);
  const std::string curve = run.lru_curve.empty() ? "" : lru_curve_csv(run.lru_curve);
  const std::string info = run_json(run.info, run.rows, {results, blocks, curve});
  if (!curve.empty()) write_file_atomically(directory / "lru_curve.csv", curve);
  write_file_atomically(directory / "results.csv", results);
  write_file_atomically(directory / "blocks.csv", blocks);
  if (run.kept) write_file_atomically(directory / "kept.json", kept_json(*run.kept));
  write_file_atomically(directory / "run.json", info);
  run.hash = xxh3_hex(info);
}

std::vector<LruPoint> mean_lru_curve(std::span<const LruPoint> curve) {
  // Key: the budget. Value: the sum of its points, and their number.
  std::map<std::uint32_t, std::pair<LruPoint, std::size_t>> sums;
  std::size_t traces = 0;
  for (const LruPoint& point : curve) {
    auto& [sum, count] = sums[point.budget_tokens];
    sum.fetch_rate += point.fetch_rate;
    sum.fetch_bytes += point.fetch_bytes;
    traces = std::max(traces, ++count);
  }
  std::vector<LruPoint> means;
  const auto divisor = static_cast<double>(traces);
  for (const auto& [budget, own] : sums)
    if (own.second == traces)
      means.push_back(
          {"", budget, own.first.fetch_rate / divisor, own.first.fetch_bytes / divisor});
  return means;
}

std::string buffer_sizes_text(std::span<const LruPoint> curve) {
  const std::vector<LruPoint> means = mean_lru_curve(curve);
  std::vector<std::string> sizes;
  for (const double rate : {0.2, 0.1, 0.05, 0.02, 0.01}) {
    const auto found = std::ranges::find_if(
        means, [&](const LruPoint& point) { return point.fetch_rate <= rate; });
    if (found != means.end())
      sizes.push_back(fmt::format("{} tokens for {:g}%", found->budget_tokens, 100 * rate));
  }
  if (sizes.empty()) return "";
  return fmt::format(
      "Smallest buffers with which lru fetches at most a given share of the selected tokens: {}.",
      fmt::join(sizes, ", "));
}

Run load_run(const std::filesystem::path& directory) {
  const std::filesystem::path info_path = directory / "run.json",
                              rows_path = directory / "results.csv";
  if (!std::filesystem::exists(info_path))
    throw std::runtime_error(fmt::format(
        "{}: is not a run; it should be a directory made by `kvlab replay`", directory.string()));
  Run run;
  const std::string info = read_text_file(info_path, kMaxJsonBytes);
  const json info_json = parse_result_json(info, info_path.string());
  const JsonFields fields(info_json, info_path.string());
  fields.check_format(kRunFormat);
  run.info = info_from(fields);
  run.hash = xxh3_hex(info);

  const std::string results = read_checked(rows_path, fields, "results_xxh3");
  run.rows = parse_results_csv(results, rows_path.string());
  if (run.rows.empty()) throw std::runtime_error(rows_path.string() + ": holds no results");
  for (const ResultRow& row : run.rows) refuse_foreign(row, run.info, rows_path.string());
  if (fields.has("blocks_xxh3")) {
    const std::filesystem::path path = directory / "blocks.csv";
    parse_blocks_csv(read_checked(path, fields, "blocks_xxh3"), path.string(), run.rows);
  }
  if (fields.has("lru_curve_xxh3")) {
    const std::filesystem::path path = directory / "lru_curve.csv";
    run.lru_curve = parse_lru_curve(read_checked(path, fields, "lru_curve_xxh3"), path.string());
  }
  name_texts(run.rows, run.info);

  const std::filesystem::path kept_path = directory / "kept.json";
  if (std::filesystem::exists(kept_path)) {
    const json kept =
        parse_result_json(read_text_file(kept_path, kMaxJsonBytes), kept_path.string());
    run.kept = read_kept(JsonFields(kept, kept_path.string()));
  }
  return run;
}

}  // namespace kvlab
