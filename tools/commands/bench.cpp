#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <stdexcept>

#include "engine/bench.hpp"
#include "engine/bench_limits.hpp"
#include "engine/evaluation/device/layered_evaluation.hpp"
#include "sim/bench/replay_cost.hpp"
#include "tools/command.hpp"
#include "tools/options.hpp"
#include "traces/base/json.hpp"
#include "traces/base/process.hpp"

namespace kvlab {
namespace {

// Prints the result of a benchmark for people: the names of its JSON, with rounded numbers.

using nlohmann::ordered_json;
using Cells = std::vector<std::string>;

/// Four digits, with suffixes k, M, G, T.
std::string shortened(const ordered_json& value) {
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

/// A table. The first line names the columns. `first`: text before each row.
class Table {
 public:
  void add(const ordered_json& row, const std::string& first = "") {
    Cells names{""}, cells{first};
    for (const auto& [name, value] : row.items()) {
      if (!value.is_array()) {
        names.push_back(name);
        cells.push_back(shortened(value));
        continue;
      }
      for (const ordered_json& column : value) {
        names.push_back(shortened(column.front()));
        cells.push_back(shortened(column.back()));
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

/// Prints a JSON object as lines. Lists of objects become tables, and so do objects in a row with
/// the same members. In a list inside a table's row, each object becomes a column named by its
/// first member, with the value of its last.
void print_metrics(const ordered_json& metrics) {
  Table rows;
  for (const auto& [name, value] : metrics.items()) {
    if (value.is_object()) {
      rows.add(value, name);
      continue;
    }
    if (!value.is_array()) {
      fmt::print("{:<26}{}\n", name, shortened(value));
      continue;
    }
    fmt::print("{}\n", name);
    Table table;
    for (const ordered_json& row : value) table.add(row);
    table.print();
  }
  rows.print();
}

// `kvlab bench replay`: a replay next to an exact pass of attention.

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

SyntheticShape shape_from(const po::variables_map& options) {
  SyntheticShape shape;
  shape.layers = count_from(options, "synthetic-layers", 1, kMaxHeads);
  shape.query_heads = count_from(options, "synthetic-query-heads", 1, kMaxHeads);
  shape.kv_heads = count_from(options, "synthetic-kv-heads", 1, kMaxHeads);
  shape.head_size = count_from(options, "synthetic-head-size", 1, kMaxHeads);
  shape.tokens = count_from(options, "tokens", 1, kMaxReplayTokens);
  shape.prompt_tokens = std::max(1u, shape.tokens / 8);
  shape.gradient_samples =
      count_from(options, "synthetic-gradient-samples", 0, kMaxGradientSamples);
  if (shape.query_heads % shape.kv_heads != 0 || shape.head_size % 2 != 0 || shape.tokens < 2)
    throw std::invalid_argument(
        "--synthetic-query-heads should be a multiple of --synthetic-kv-heads, "
        "--synthetic-head-size should be even, and --tokens should be at least 2");
  return shape;
}

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

/// `--trace`, `--sweep`, `--repeats`, `--synthetic-…`.
void add_bench_replay_options(po::options_description& options) {
  auto add = options.add_options();
  add("trace", text_option("TRACE"),
      "replay: the trace to replay (default: a synthetic one in the shape of Llama-3.1-8B)");
  add("sweep", text_option("NAMES"),
      "replay: the sweeps to time, by the names that it prints (default: all); also `shelf` (every "
      "policy) or a policy's name");
  add("repeats", number_option("N", 3),
      "replay: number of repetitions, alternating with the exact pass; the shortest times count");
  add("synthetic-layers", number_option("N", 4),
      "replay: layers of the synthetic trace, which has --tokens tokens, one eighth of them the "
      "prompt");
  add("synthetic-query-heads", number_option("N", 32),
      "replay: query heads of the synthetic trace");
  add("synthetic-kv-heads", number_option("N", 8), "replay: KV heads of the synthetic trace");
  add("synthetic-head-size", number_option("N", 128), "replay: head size of the synthetic trace");
  add("synthetic-gradient-samples", number_option("N", 0),
      "replay: gradient samples of the synthetic trace; with 1 or more, it also has residual norms "
      "and a sketch");
}

/// Runs the benchmark. Throws as commands do.
ordered_json bench_replay(const po::variables_map& options) {
  const auto device =
      options.count("device") && device_from(options) == Device::cuda ? cuda_replayer() : nullptr;
  const auto sweeps = bench_sweeps(list_from(options, "sweep"));
  const auto repeats = count_from(options, "repeats", 1, kMaxRepeats);
  ReplayOptions how;
  how.threads = threads_from(options);
  std::optional<TemporaryTrace> synthetic;
  std::optional<TraceReader> given;
  if (options.count("trace"))
    given = TraceReader::open(options["trace"].as<std::string>());
  else
    synthetic.emplace(shape_from(options));
  const TraceReader& trace = given ? *given : synthetic->trace();
  const ReplayCost bench = measure_replay(trace, sweeps, how, repeats, device.get());
  return to_json(bench, trace, how.threads, device != nullptr);
}

constexpr std::int64_t kMaxTokens = 1 << 28, kMaxRows = 1 << 16, kMaxSlots = 1 << 20;

void add_options(po::options_description& options) {
  auto add = options.add_options();
  add("what",
      po::value<std::vector<std::string>>()->value_name(
          "decode|prefill|stream|evict|eval|attention|replay"),
      "what to measure");
  add("model", text_option("DIR"), "a checkpoint");
  add("random-weights", text_option("CONFIG.json"),
      "a model's config.json; its weights are random and made on the device: "
      "engine/models/configs/*.json");
  add("batch", number_option("N", 1), "decode, evict: number of sequences");
  add("context", number_option("N", 1024), "decode: tokens in each sequence at the start");
  add("steps", number_option("N", 64), "decode: number of timed steps");
  add("capture", text_option("TRACE"),
      "decode: also time sampling with and without capture; the capture writes this new trace");
  add("tokens", number_option("N", 4096),
      "prefill: tokens of the prompt; eval: tokens of the sequence");
  add("chunk", number_option("N", 2048), "prefill: tokens of a chunk");
  add("prompt-tokens", number_option("N", 2048),
      "evict, eval: tokens in each sequence at the start");
  add("max-new-tokens", number_option("N", 2048), "evict: tokens to decode in each sequence");
  add("head-size", text_option("LIST"), "attention: 64, 96, 128, 256");
  add("group", text_option("LIST"), "attention: query heads for each of the 8 KV heads");
  add("sequences", text_option("LIST"), "attention: number of sequences");
  add("slots", number_option("N", 4096), "attention: live tokens of each sequence");
  add_policy_options(options);
  add_bench_replay_options(options);
  add_common_options(options);
}

BenchModel model_from(const po::variables_map& options) {
  const auto text = [&](const char* name) {
    return options.count(name) ? options[name].as<std::string>() : std::string();
  };
  const BenchModel model{.directory = text("model"), .random_weights = text("random-weights")};
  if (model.directory.empty() == model.random_weights.empty())
    throw std::invalid_argument(
        "--model: missing, or given beside --random-weights; give one of --model DIR and "
        "--random-weights CONFIG.json");
  return model;
}

ordered_json decode(const po::variables_map& options) {
  DecodeBenchOptions how{.model = model_from(options),
                         .batch = static_cast<int>(count_from(options, "batch", 1, kMaxRows)),
                         .context = count_from(options, "context", 1, kMaxTokens),
                         .steps = count_from(options, "steps", 1, kMaxTokens)};
  if (options.count("capture")) {
    how.capture = options["capture"].as<std::string>();
    refuse_existing(how.capture, "--capture");
  }
  return bench_decode(how);
}

ordered_json prefill(const po::variables_map& options) {
  const std::uint32_t tokens = count_from(options, "tokens", 1, kMaxTokens);
  return bench_prefill({.model = model_from(options),
                        .tokens = tokens,
                        .chunk = count_from(options, "chunk", 1, kMaxTokens),
                        .cache = resolve(only_config(options), tokens)});
}

/// `--policy` and `--budget`: one policy that evicts, at one or more budgets.
std::vector<CacheConfig> evicting_from(const po::variables_map& options) {
  std::vector<CacheConfig> sweep = sweep_from(options);
  for (const CacheConfig& config : sweep)
    if (!config.evicts() || config.policy.text() != sweep.front().policy.text())
      throw std::invalid_argument(
          "--policy: bench evict needs exactly one policy that evicts; give --policy P and its "
          "--budget B");
  return sweep;
}

ordered_json stream(const po::variables_map& options) {
  const std::vector<CacheConfig> sweep = evicting_from(options);
  StreamBenchOptions how{.model = model_from(options),
                         .cache = sweep.front(),
                         .steps = count_from(options, "steps", 1, kMaxTokens)};
  for (const CacheConfig& config : sweep) {
    if (config.budget.extent.is_share || config.budget.in_bytes || !config.budget.is_even() ||
        config.budget.all)
      throw std::invalid_argument(
          "--budget: a share needs a length, and a stream has none; give tokens");
    how.budgets.push_back(config.budget.resolve(0, 0));
  }
  return bench_stream(how);
}

ordered_json eval(const po::variables_map& options) {
  EvalBenchOptions how{.model = model_from(options),
                       .configs = sweep_from(options),
                       .tokens = count_from(options, "tokens", 4, kMaxTokens),
                       .threads = threads_from(options)};
  how.prompt_tokens = count_from(options, "prompt-tokens", 1, how.tokens - 2);
  how.configs.insert(how.configs.begin(), CacheConfig{});
  return bench_eval(how);
}

ordered_json evict(const po::variables_map& options) {
  const std::vector<CacheConfig> sweep = evicting_from(options);
  if (sweep.size() != 1) throw std::invalid_argument("--budget: give one");
  EvictBenchOptions how{.model = model_from(options),
                        .batch = static_cast<int>(count_from(options, "batch", 1, kMaxRows)),
                        .prompt = count_from(options, "prompt-tokens", 1, kMaxTokens),
                        .decoded = count_from(options, "max-new-tokens", 1, kMaxTokens)};
  how.cache = resolve(sweep.front(), how.prompt + how.decoded);
  return bench_evict(how);
}

/// Reads a list of numbers; keeps the default if the option was not given.
void read_numbers(const po::variables_map& options, const char* name, std::uint32_t most,
                  std::vector<std::uint32_t>& numbers) {
  if (!options.count(name)) return;
  numbers.clear();
  for (const std::string& text : list_from(options, name)) {
    std::uint32_t number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc() || end != text.data() + text.size() || number < 1 || number > most)
      throw std::invalid_argument(
          fmt::format("--{}: '{}' should be a number from 1 to {}", name, text, most));
    numbers.push_back(number);
  }
}

ordered_json attention(const po::variables_map& options) {
  AttentionBenchOptions how{.slots = count_from(options, "slots", 4, kMaxSlots)};
  if (options.count("policy")) how.policies = list_from(options, "policy");
  if (options.count("tiers")) {  // at the same number of bytes
    const std::vector<std::string> policies = std::exchange(how.policies, {});
    for (const TierPlan& tier_plan : tier_plans_from(options))
      for (const std::string& policy : policies)
        how.policies.push_back(policy + (tier_plan.is_plain() ? "" : ":" + tier_plan.setting()));
  }
  read_numbers(options, "head-size", 256, how.head_sizes);
  read_numbers(options, "group", 8, how.groups);
  read_numbers(options, "sequences", 1024, how.batches);
  return bench_attention(how);
}

int run(const po::variables_map& options) {
  const auto words = options.count("what") ? options["what"].as<std::vector<std::string>>()
                                           : std::vector<std::string>{};
  const std::map<std::string, ordered_json (*)(const po::variables_map&)> benches{
      {"decode", decode},       {"prefill", prefill},     {"stream", stream}, {"evict", evict},
      {"attention", attention}, {"replay", bench_replay}, {"eval", eval}};
  if (words.size() != 1 || !benches.contains(words[0]))
    throw std::invalid_argument(
        "what to measure is missing; give one of: decode, prefill, stream, evict, eval, attention, "
        "replay");
  if (words[0] != "replay" && options.count("device") && device_from(options) == Device::cpu)
    throw std::invalid_argument("--device: bench measures the CUDA decoder; leave it out");
  ordered_json metrics;
  try {
    metrics = benches.at(words[0])(options);
  } catch (const LimitExceeded& error) {
    fmt::print(stderr, "kvlab bench: {}\n", error.what());
    return 1;
  }
  if (options["json"].as<bool>())
    print_json(metrics);
  else
    print_metrics(metrics);
  return 0;
}

}  // namespace

Command bench_command() {
  return {
      .name = "bench",
      .summary = "times the CUDA decoder and replay beside the machine's limits",
      .usage =
          "decode|prefill|stream|evict|eval --model DIR|--random-weights CONFIG.json [options]\n"
          "       kvlab bench attention [options]\n"
          "       kvlab bench replay [--trace TRACE] [options]",
      .example = "kvlab bench replay --trace traces/samples/tiny-story",
      .add_options = add_options,
      .positional = "what",
      .run = run};
}

}  // namespace kvlab
