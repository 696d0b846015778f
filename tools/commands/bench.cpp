#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <stdexcept>

#include "engine/bench.hpp"
#include "engine/bench_limits.hpp"
#include "engine/evaluation/device/layered_evaluation.hpp"
#include "engine/evaluation/predict/decode_cost.hpp"
#include "sim/bench/replay_cost.hpp"
#include "tools/command.hpp"
#include "tools/options.hpp"
#include "traces/base/json.hpp"
#include "traces/base/process.hpp"

namespace kvlab {
namespace {

// Prints the result of a benchmark as text: the members of its JSON object, with rounded numbers.

using nlohmann::ordered_json;
using Cells = std::vector<std::string>;

/// Returns a number as text with about four digits. A large number gets a suffix k, M, G or T.
/// Other values are returned unchanged.
std::string shorten(const ordered_json& value) {
  if (!value.is_number()) return value.is_string() ? value.get<std::string>() : json_text(value);
  double number = value.get<double>();
  if (value.is_number_integer() && std::fabs(number) < 1e6) return json_text(value);
  std::string_view unit = "";
  for (const std::string_view larger : {"k", "M", "G", "T"}) {
    if (std::fabs(number) < 1e4) break;
    number /= 1e3;
    unit = larger;
  }
  return fmt::format("{:.4g}{}", number, unit);
}

/// A table. Its first line has the names of the columns. `first` is printed before the cells of a
/// row.
class Table {
 public:
  void add(const ordered_json& row, const std::string& first = "") {
    Cells names{""}, cells{first};
    for (const auto& [name, value] : row.items()) {
      if (!value.is_array()) {
        names.push_back(name);
        cells.push_back(shorten(value));
        continue;
      }
      for (const ordered_json& column : value) {
        names.push_back(shorten(column.front()));
        cells.push_back(shorten(column.back()));
      }
    }
    if (names.size() > lines_.front().size()) lines_.front() = names;
    lines_.push_back(std::move(cells));
  }

  void print() const {
    for (const Cells& line : lines_) {
      for (std::size_t column = 0; column < line.size(); ++column) {
        std::size_t width = 0;
        for (const Cells& other : lines_)
          if (column < other.size()) width = std::max(width, other[column].size());
        const bool last = column + 1 == line.size();
        fmt::print("{:<{}}{}", line[column], last ? 0 : width, last ? "\n" : "  ");
      }
    }
  }

 private:
  std::vector<Cells> lines_{Cells{}};
};

/// Prints a JSON object as lines. A list of objects becomes a table. All members that are objects
/// themselves share one table, with a row for each object. If a row contains a list of objects,
/// each object of that list becomes a column: the first member of the object names the column, and
/// the last member is the value.
void print_metrics(const ordered_json& metrics) {
  Table rows;
  for (const auto& [name, value] : metrics.items()) {
    if (value.is_object()) {
      rows.add(value, name);
      continue;
    }
    if (!value.is_array()) {
      fmt::print("{:<26}{}\n", name, shorten(value));
      continue;
    }
    fmt::print("{}\n", name);
    Table table;
    for (const ordered_json& row : value) table.add(row);
    table.print();
  }
  rows.print();
}

/// The result of `bench evict` in the form that print_metrics() prints: a row for each
/// configuration, and then a row for each one that cannot run, with the reason.
ordered_json evict_tables(ordered_json metrics) {
  ordered_json rows = ordered_json::array(), refused = ordered_json::array();
  for (const ordered_json& own : metrics["configurations"]) {
    if (own.contains("refused")) {
      refused.push_back(own);
      continue;
    }
    const ordered_json &evicting = own["evicting"], &largest = own["largest_evicting"];
    rows.push_back({{"policy", own["policy"]},
                    {"budget_tokens", own["budget_tokens"]},
                    {"batch", evicting["batch"]},
                    {"tokens_per_second", evicting["tokens_per_second"]},
                    {"time_ratio", own["time_ratio"]},
                    {"largest_batch", largest["batch"]},
                    {"largest_tokens_per_second", largest["tokens_per_second"]},
                    {"throughput_ratio", own["throughput_ratio"]}});
  }
  metrics["configurations"] = std::move(rows);
  if (!refused.empty()) metrics["refused"] = std::move(refused);
  return metrics;
}

// `kvlab bench replay`: times replays. For comparison, also times exact attention over the whole
// trace.

using nlohmann::ordered_json;

constexpr std::int64_t kMaxReplayTokens = 1 << 20, kMaxHeads = 1024, kMaxRepeats = 1000;

/// A synthetic trace that exists only while it is measured.
class TemporaryTrace {
 public:
  explicit TemporaryTrace(const SyntheticShape& shape)
      : trace_(write_synthetic_trace(folder_ / "trace", shape, 1)) {}
  const TraceReader& trace() const { return trace_; }

 private:
  TemporaryFolder folder_;
  TraceReader trace_;
};

ordered_json to_json(const ReplayCost& bench, const TraceReader& trace, unsigned threads,
                     bool on_device) {
  const ModelShape& shape = trace.shape();
  ordered_json sweeps = ordered_json::array();
  ordered_json json{{"bench", "replay"},
                    {"tokens", trace.tokens()},
                    {"layers", shape.layers},
                    {"query_heads", shape.query_heads},
                    {"kv_heads", shape.kv_heads},
                    {"head_size", shape.head_size},
                    {"threads", threads},
                    {"device", on_device ? "cuda" : "cpu"},
                    {"bytes_read", bench.bytes_read},
                    {"exact_seconds", bench.exact.time.seconds},
                    {"exact_cpu_seconds", bench.exact.time.cpu_seconds},
                    {"exact_flops_per_second", bench.exact.flops / bench.exact.time.seconds}};
  for (const SweepTime& sweep : bench.sweeps) {
    sweeps.push_back({{"name", sweep.name},
                      {"configurations", sweep.configs},
                      {"seconds", sweep.time.seconds},
                      {"cpu_seconds", sweep.time.cpu_seconds},
                      {"ratio", sweep.ratio},
                      {"cpu_ratio", sweep.cpu_ratio},
                      {"slots_per_second", sweep.slot_steps_per_second()}});
    if (sweep.step_microseconds > 0)
      sweeps.back()["microseconds_per_step_and_wave"] = sweep.step_microseconds;
    if (sweep.name == "sweep") {
      json["ratio_to_attention"] = sweep.ratio;
      json["cpu_ratio_to_attention"] = sweep.cpu_ratio;
    }
  }
  json["sweeps"] = std::move(sweeps);
  return json;
}

constexpr std::int64_t kMaxTokens = 1 << 28, kMaxRows = 1 << 16, kMaxSlots = 1 << 20,
                       kMaxPoolGib = 1 << 10;

struct Request {
  std::vector<std::string> words;     ///< what to measure
  std::string model, random_weights;  ///< exactly one of them is given
  int batch = 1;
  std::uint32_t context = 1024, steps = 64, chunk = 2048, max_new_tokens = 2048;
  std::int64_t tokens = 4096, prompt_tokens = 2048;
  std::string capture;
  AttentionBenchOptions attention;
  CacheOptions caches;
  // for `bench link`
  std::uint32_t pool_gib = 4;
  SelectionOptions selection;
  // for `bench replay`
  std::string trace;
  std::vector<std::string> sweeps;
  std::uint32_t repeats = 3;
  SyntheticShape synthetic;
  CommonOptions common;
};

// `kvlab bench replay`.

void add_replay_options(OptionTable& table, Request& request) {
  SyntheticShape& shape = request.synthetic;
  constexpr Range kHeads{1, kMaxHeads};
  table.text("trace", "TRACE", request.trace,
             "replay: the trace to replay (default: a synthetic one in the shape of Llama-3.1-8B)");
  table.list("sweep", "NAMES", request.sweeps,
             "replay: the sweeps to time: names that the output shows, `shelf` for every policy, "
             "or the name of a policy (default: all sweeps)");
  table.whole("repeats", "N", {1, kMaxRepeats}, request.repeats,
              "replay: number of repetitions, each after one exact pass; the shortest times are "
              "reported");
  table.whole("synthetic-layers", "N", kHeads, shape.layers,
              "replay: number of layers of the synthetic trace; it has --tokens tokens, and one "
              "eighth of them are its prompt");
  table.whole("synthetic-query-heads", "N", kHeads, shape.query_heads,
              "replay: number of query heads of the synthetic trace");
  table.whole("synthetic-kv-heads", "N", kHeads, shape.kv_heads,
              "replay: number of KV heads of the synthetic trace");
  table.whole("synthetic-head-size", "N", kHeads, shape.head_size,
              "replay: head size of the synthetic trace");
  table.whole("synthetic-gradient-samples", "N", {0, kMaxGradientSamples}, shape.gradient_samples,
              "replay: number of gradient samples of the synthetic trace; with 1 or more, it also "
              "has residual norms and a sketch");
}

SyntheticShape synthetic_shape(const Request& request) {
  SyntheticShape shape = request.synthetic;
  check_range("tokens", request.tokens, {1, kMaxReplayTokens});
  shape.tokens = static_cast<std::uint32_t>(request.tokens);
  shape.prompt_tokens = std::max(1u, shape.tokens / 8);
  if (shape.query_heads % shape.kv_heads != 0 || shape.head_size % 2 != 0 || shape.tokens < 2)
    throw std::invalid_argument(
        "--synthetic-query-heads should be a multiple of --synthetic-kv-heads, "
        "--synthetic-head-size should be even, and --tokens should be at least 2");
  return shape;
}

/// Runs `kvlab bench replay` and returns its result.
ordered_json bench_replay(const Request& request) {
  const auto device = request.common.device == Device::cuda ? cuda_replayer() : nullptr;
  const auto sweeps = bench_sweeps(request.sweeps);
  ReplayOptions how;
  how.threads = request.common.threads;
  std::optional<TemporaryTrace> synthetic;
  std::optional<TraceReader> given;
  if (!request.trace.empty())
    given = TraceReader::open(request.trace);
  else
    synthetic.emplace(synthetic_shape(request));
  const TraceReader& trace = given ? *given : synthetic->trace();
  const ReplayCost bench = measure_replay(trace, sweeps, how, request.repeats, device.get());
  return to_json(bench, trace, how.threads, device != nullptr);
}

// The other benchmarks, which measure the CUDA decoder.

BenchModel model_of(const Request& request) {
  if (request.model.empty() == request.random_weights.empty())
    throw std::invalid_argument(
        "--model: missing, or given beside --random-weights; give one of --model DIR and "
        "--random-weights CONFIG.json");
  return {.directory = request.model, .random_weights = request.random_weights};
}

std::uint32_t tokens_of(const Request& request, std::int64_t min_tokens) {
  check_range("tokens", request.tokens, {min_tokens, kMaxTokens});
  return static_cast<std::uint32_t>(request.tokens);
}

std::uint32_t prompt_tokens_of(const Request& request, std::int64_t max_tokens) {
  check_range("prompt-tokens", request.prompt_tokens, {1, max_tokens});
  return static_cast<std::uint32_t>(request.prompt_tokens);
}

ordered_json decode(const Request& request) {
  if (!request.capture.empty()) refuse_existing(request.capture, "--capture");
  return bench_decode({.model = model_of(request),
                       .batch = request.batch,
                       .context = request.context,
                       .steps = request.steps,
                       .capture = request.capture});
}

ordered_json prefill(const Request& request) {
  const std::uint32_t tokens = tokens_of(request, 1);
  const CacheConfig config = only_config(request.caches, compiled_policies(request.caches));
  return bench_prefill({.model = model_of(request),
                        .tokens = tokens,
                        .chunk = request.chunk,
                        .cache = resolve(config, tokens)});
}

std::vector<CacheConfig> requested_sweep(const Request& request) {
  return sweep_of(request.caches, compiled_policies(request.caches));
}

/// `--policy` and `--budget`: policies that evict, each at every budget.
std::vector<CacheConfig> evicting_sweep(const Request& request) {
  std::vector<CacheConfig> sweep = requested_sweep(request);
  if (!std::ranges::all_of(sweep, &CacheConfig::evicts))
    throw std::invalid_argument(
        "--policy: bench stream and bench evict need policies that evict; give --policy P and its "
        "--budget B");
  return sweep;
}

ordered_json stream(const Request& request) {
  const std::vector<CacheConfig> sweep = evicting_sweep(request);
  StreamBenchOptions how{
      .model = model_of(request), .cache = sweep.front(), .budgets = {}, .steps = request.steps};
  for (const CacheConfig& config : sweep) {
    if (config.policy.text() != sweep.front().policy.text())
      throw std::invalid_argument("--policy: bench stream measures one policy; give one");
    if (config.budget.extent.is_share || config.budget.in_bytes || !config.budget.is_even() ||
        config.budget.all)
      throw std::invalid_argument(
          "--budget: a share needs a length, but a stream has none; give tokens");
    how.budgets.push_back(config.budget.resolve(0, 0));
  }
  return bench_stream(how);
}

ordered_json eval(const Request& request) {
  EvalBenchOptions how{.model = model_of(request),
                       .configs = requested_sweep(request),
                       .tokens = tokens_of(request, 4),
                       .threads = request.common.threads};
  how.prompt_tokens = prompt_tokens_of(request, how.tokens - 2);
  how.configs.insert(how.configs.begin(), CacheConfig{});
  return bench_eval(how);
}

/// Prints one line after each configuration of `bench evict`, because each takes seconds.
void say_progress(const ordered_json& done) {
  const auto policy = done["policy"].get<std::string>();
  if (done.contains("refused")) return fmt::print(stderr, "{}: not measured\n", policy);
  const auto speed = [&](const char* runs) {
    const ordered_json& run = done[runs];
    return fmt::format("{} tokens/s with {} sequence(s)", shorten(run["tokens_per_second"]),
                       run["batch"].get<int>());
  };
  fmt::print(stderr, "{}: {}, {}\n", policy, speed("evicting"), speed("largest_evicting"));
}

ordered_json evict(const Request& request) {
  return bench_evict({.model = model_of(request),
                      .configs = evicting_sweep(request),
                      .batch = request.batch,
                      .prompt = prompt_tokens_of(request, kMaxTokens),
                      .decoded = request.max_new_tokens,
                      .progress = say_progress});
}

ordered_json attention(const Request& request) {
  AttentionBenchOptions how = request.attention;
  if (!request.caches.sweep.policies.empty()) how.policies = request.caches.sweep.policies;
  how.policies = apply_tier_plans(how.policies, request.caches.tier_plans, request.caches.centre);
  return bench_attention(how);
}

/// The decode step that `bench link` times: its context length, and how many tokens a query
/// selects, in pages of how many tokens.
RefetchSetup refetch_setup(const Request& request) {
  return {.context = request.context,
          .selected = request.selection.selected,
          .page = request.selection.page};
}

std::vector<LinkStep> link_steps(const Request& request, const DecodeCost& cost) {
  const RefetchSetup setup = refetch_setup(request);
  const auto batch = static_cast<std::uint32_t>(request.batch);
  std::vector<LinkStep> steps;
  for (const double fetch_rate : request.selection.fetch_rates)
    steps.push_back({.layers = cost.full_layers(),
                     .rows = static_cast<std::uint32_t>(
                         std::lround(cost.fetched_rows(batch, setup, fetch_rate))),
                     .row_bytes = cost.row_bytes(),
                     .read_bytes = static_cast<std::uint64_t>(
                         cost.refetch_read_bytes(batch, setup) / cost.full_layers())});
  return steps;
}

/// Puts the times that `kvlab predict` would print beside the measured ones.
void add_predictions(ordered_json& metrics, const Request& request, const ModelConfig& config) {
  const DecodeCost cost(config, parse_link(nlohmann::json::parse(metrics.dump()), "bench link"));
  const auto batch = static_cast<std::uint32_t>(request.batch);
  for (std::size_t i = 0; i < request.selection.fetch_rates.size(); ++i) {
    const double fetch_rate = request.selection.fetch_rates[i];
    ordered_json& step = metrics["steps"][i];
    const double measured = step["milliseconds"],
                 predicted = 1e3 * cost.refetch(batch, refetch_setup(request), fetch_rate).serial();
    step["fetch_rate"] = fetch_rate;
    step["tokens_per_second"] = batch / (measured * 1e-3);
    step["predicted_milliseconds"] = predicted;
    step["measured_to_predicted"] = measured / predicted;
  }
}

ordered_json link(const Request& request) {
  LinkBenchOptions how{.pool_bytes = std::uint64_t{request.pool_gib} << 30, .steps = {}};
  if (request.random_weights.empty()) return bench_link(how);
  const ModelConfig config = read_model_config(
      request.random_weights, std::filesystem::path(request.random_weights).stem());
  how.steps = link_steps(request, DecodeCost(config, {}));
  ordered_json metrics = bench_link(how);
  add_predictions(metrics, request, config);
  return metrics;
}

const std::map<std::string, ordered_json (*)(const Request&)>& benches() {
  static const std::map<std::string, ordered_json (*)(const Request&)> all{
      {"decode", decode},       {"prefill", prefill},     {"stream", stream}, {"evict", evict},
      {"attention", attention}, {"replay", bench_replay}, {"eval", eval},     {"link", link}};
  return all;
}

void check(Request& request, const GivenOptions& given) {
  const auto& words = request.words;
  if (words.size() != 1 || !benches().contains(words[0]))
    throw std::invalid_argument(
        "what to measure is missing; give one of: decode, prefill, stream, evict, eval, attention, "
        "link, replay");
  if (words[0] != "replay" && given.has("device") && request.common.device == Device::cpu)
    throw std::invalid_argument("--device: bench measures the CUDA decoder; leave it out");
  if (words[0] == "decode" || words[0] == "link" || words[0] == "replay")
    given.refuse({"policy", "policy-source", "budget", "tiers", "centre", "prefill", "positions"},
                 fmt::format("bench {} does not use it", words[0]));
  if (words[0] != "link")
    given.refuse({"pool-gib", "selected", "page", "fetch-rate"}, "only bench link has it");
  else if (request.random_weights.empty() != request.selection.fetch_rates.empty())
    throw std::invalid_argument(
        "--fetch-rate and --random-weights: bench link measures a step if both are given; give "
        "both "
        "or neither");
  else if (!request.selection.fetch_rates.empty() && request.selection.selected >= request.context)
    throw std::invalid_argument(fmt::format("--selected: {} should be less than --context {}",
                                            request.selection.selected, request.context));
}

void add_options(OptionTable& table, Request& request) {
  constexpr Range kTokens{1, kMaxTokens};
  table.texts("what", "decode|prefill|stream|evict|eval|attention|link|replay", Takes::one_word,
              request.words, "what to measure");
  table.text("model", "DIR", request.model, "a checkpoint");
  table.text("random-weights", "CONFIG.json", request.random_weights,
             "a model's config.json, such as those in engine/models/configs; its weights are "
             "random and are created on the device");
  table.whole("batch", "N", {1, kMaxRows}, request.batch,
              "decode, evict, link: number of sequences");
  table.whole(
      "context", "N", kTokens, request.context,
      "decode: number of tokens in each sequence at the start; link: tokens of each sequence");
  table.whole("steps", "N", kTokens, request.steps, "decode: number of timed steps");
  table.text("capture", "TRACE", request.capture,
             "decode: also time the decoding of sampled tokens with and without a capture, which "
             "writes this new trace");
  table.whole("tokens", "N", kAnyNumber, request.tokens,
              "prefill: tokens of the prompt; eval: tokens of the sequence");
  table.whole("chunk", "N", kTokens, request.chunk, "prefill: tokens of a chunk");
  table.whole("prompt-tokens", "N", kAnyNumber, request.prompt_tokens,
              "evict, eval: tokens in each sequence at the start");
  table.whole("max-new-tokens", "N", kTokens, request.max_new_tokens,
              "evict: tokens to decode in each sequence");
  AttentionBenchOptions& attention = request.attention;
  add_numbers_option(table, "head-size", 256, attention.head_sizes, "attention: 64, 96, 128, 256");
  add_numbers_option(table, "group", 8, attention.groups,
                     "attention: query heads for each of the 8 KV heads");
  add_numbers_option(table, "sequences", 1024, attention.batches, "attention: number of sequences");
  table.whole("slots", "N", {4, kMaxSlots}, attention.slots,
              "attention: live tokens of each sequence");
  table.whole("pool-gib", "N", {1, kMaxPoolGib}, request.pool_gib,
              "link: GiB of host memory over which rows are scattered");
  add_selection_options(table, request.selection, "link, with --random-weights: ");
  add_cache_options(table, request.caches);
  add_replay_options(table, request);
  add_common_options(table, request.common, Device::cpu);
}

int run(const Request& request) {
  ordered_json metrics;
  try {
    metrics = benches().at(request.words[0])(request);
  } catch (const LimitExceeded& error) {
    fmt::print(stderr, "kvlab bench: {}\n", error.what());
    return 1;
  }
  if (request.common.json)
    print_json(metrics);
  else
    print_metrics(request.words[0] == "evict" ? evict_tables(std::move(metrics)) : metrics);
  return 0;
}

}  // namespace

Command bench_command() {
  return {
      .name = "bench",
      .summary = "times the CUDA decoder, the host link and replay against hardware limits",
      .usage =
          "decode|prefill|stream|evict|eval --model DIR|--random-weights CONFIG.json [options]\n"
          "       kvlab bench attention [options]\n"
          "       kvlab bench link [--random-weights CONFIG.json --fetch-rate LIST] [options]\n"
          "       kvlab bench replay [--trace TRACE] [options]",
      .example = "kvlab bench replay --trace traces/samples/tiny-story",
      .positional = "what",
      .prepare = make_prepare(add_options, check, run)};
}

}  // namespace kvlab
