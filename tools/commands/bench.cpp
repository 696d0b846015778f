#include <fmt/format.h>

#include <map>
#include <stdexcept>

#include "engine/bench.hpp"
#include "tools/commands/benches.hpp"
#include "tools/options.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

using nlohmann::ordered_json;

constexpr std::int64_t kMostTokens = 1 << 28, kMostRows = 1 << 16;

void add_options(po::options_description& options) {
  auto add = options.add_options();
  add("what",
      po::value<std::vector<std::string>>()->value_name(
          "decode|prefill|stream|evict|attention|replay"),
      "what to measure");
  add("model", po::value<std::string>()->value_name("DIR"), "a checkpoint");
  add("random-weights", po::value<std::string>()->value_name("CONFIG.json"),
      "or the shape of one, with weights drawn on the device: engine/models/configs/*.json");
  add("batch", po::value<std::int64_t>()->value_name("N")->default_value(1),
      "decode, evict: sequences");
  add("context", po::value<std::int64_t>()->value_name("N")->default_value(1024),
      "decode: tokens in each sequence at the start");
  add("steps", po::value<std::int64_t>()->value_name("N")->default_value(64),
      "decode: steps that are timed");
  add("capture", po::value<std::string>()->value_name("TRACE"),
      "decode: also time sampling with and without capture into this new trace");
  add("tokens", po::value<std::int64_t>()->value_name("N")->default_value(4096),
      "prefill: of the prompt");
  add("chunk", po::value<std::int64_t>()->value_name("N")->default_value(2048),
      "prefill: tokens at once");
  add("prompt-tokens", po::value<std::int64_t>()->value_name("N")->default_value(2048),
      "evict: tokens in each sequence at the start");
  add("max-new-tokens", po::value<std::int64_t>()->value_name("N")->default_value(2048),
      "evict: tokens that each sequence decodes");
  add_policy_options(options);
  add_attention_options(options);
  add_bench_replay_options(options);
  add_common_options(options);
}

BenchModel model_from(const po::variables_map& options) {
  const auto text = [&](const char* name) {
    return options.count(name) ? options[name].as<std::string>() : std::string();
  };
  const BenchModel model{.directory = text("model"), .random_weights = text("random-weights")};
  if (model.directory.empty() == model.random_weights.empty())
    throw std::invalid_argument("--model: give either --model DIR or --random-weights CONFIG.json");
  return model;
}

std::uint32_t count_from(const po::variables_map& options, const char* name, std::int64_t most) {
  return static_cast<std::uint32_t>(number_from(options, name, 1, most));
}

double share(double part, double whole) { return whole > 0 ? part / whole : 0; }

ordered_json to_json(const DecodeBench& bench, const DecodeBenchOptions& options) {
  ordered_json parts = ordered_json::array();
  for (const PartTime& part : bench.parts) {
    ordered_json entry{{"name", part.name}, {"milliseconds", part.milliseconds}};
    if (part.bytes > 0) {
      entry["bytes"] = part.bytes;
      entry["bytes_per_second"] = static_cast<double>(part.bytes) / (part.milliseconds * 1e-3);
    }
    parts.push_back(std::move(entry));
  }
  ordered_json json{
      {"bench", "decode"},
      {"model", bench.model},
      {"dtype", bench.dtype},
      {"device", bench.device},
      {"batch", options.batch},
      {"context", options.context},
      {"steps", options.steps},
      {"tokens_per_second", bench.tokens_per_second},
      {"step_milliseconds", bench.step_milliseconds},
      {"step_bytes", bench.step_bytes},
      {"step_bytes_per_second", bench.step_bytes_per_second()},
      {"read_bytes_per_second", bench.read_bytes_per_second},
      {"share_of_read", share(bench.step_bytes_per_second(), bench.read_bytes_per_second)},
      {"parts", std::move(parts)},
      {"logits_xxh3", bench.logits_xxh3}};
  if (bench.captured_tokens_per_second > 0)
    json["capture"] = {{"tokens_per_second_without", bench.plain_tokens_per_second},
                       {"tokens_per_second_with", bench.captured_tokens_per_second}};
  return json;
}

void print(const DecodeBench& bench, const DecodeBenchOptions& options) {
  const double read = bench.read_bytes_per_second;
  fmt::print("{} in {} on {}: decode, batch {}, {} tokens of context\n", bench.model, bench.dtype,
             bench.device, options.batch, options.context);
  fmt::print("  {:<20}{:>10}{:>12}{:>10}{:>9}\n", "", "ms", "MB", "GB/s", "of read");
  const auto line = [&](std::string_view name, double milliseconds, std::uint64_t bytes) {
    const double rate = static_cast<double>(bytes) / (milliseconds * 1e-3);
    fmt::print("  {:<20}{:>10.4f}", name, milliseconds);
    if (bytes > 0)
      fmt::print("{:>12.1f}{:>10.0f}{:>8.1f}%", static_cast<double>(bytes) * 1e-6, rate * 1e-9,
                 100 * share(rate, read));
    fmt::print("\n");
  };
  for (const PartTime& part : bench.parts) line(part.name, part.milliseconds, part.bytes);
  line("step", bench.step_milliseconds, bench.step_bytes);
  fmt::print("  read bandwidth {:.0f} GB/s; {:.1f} tokens/s; logits {}\n", read * 1e-9,
             bench.tokens_per_second, bench.logits_xxh3);
  if (bench.captured_tokens_per_second > 0)
    fmt::print("  one sequence, sampled: {:.1f} tokens/s; captured: {:.1f} ({:+.1f}%)\n",
               bench.plain_tokens_per_second, bench.captured_tokens_per_second,
               100 * (share(bench.captured_tokens_per_second, bench.plain_tokens_per_second) - 1));
}

void run_decode(const po::variables_map& options) {
  DecodeBenchOptions how{.model = model_from(options),
                         .batch = static_cast<int>(count_from(options, "batch", kMostRows)),
                         .context = count_from(options, "context", kMostTokens),
                         .steps = count_from(options, "steps", kMostTokens),
                         .capture = {}};
  if (options.count("capture")) {
    how.capture = options["capture"].as<std::string>();
    refuse_existing(how.capture, "--capture");
  }
  const DecodeBench bench = bench_decode(how);
  if (options["json"].as<bool>())
    fmt::print("{}\n", json_text(to_json(bench, how)));
  else
    print(bench, how);
}

void run_prefill(const po::variables_map& options) {
  const PrefillBenchOptions how{.model = model_from(options),
                                .tokens = count_from(options, "tokens", kMostTokens),
                                .chunk = count_from(options, "chunk", kMostTokens)};
  const PrefillBench bench = bench_prefill(how);
  const double of_matrix = share(bench.flops_per_second(), bench.matrix_flops_per_second);
  if (options["json"].as<bool>()) {
    const ordered_json json{{"bench", "prefill"},
                            {"model", bench.model},
                            {"dtype", bench.dtype},
                            {"device", bench.device},
                            {"tokens", how.tokens},
                            {"chunk", how.chunk},
                            {"milliseconds", bench.milliseconds},
                            {"tokens_per_second", bench.tokens_per_second},
                            {"flops", bench.flops},
                            {"flops_per_second", bench.flops_per_second()},
                            {"matrix_flops_per_second", bench.matrix_flops_per_second},
                            {"share_of_matrix", of_matrix},
                            {"logits_xxh3", bench.logits_xxh3}};
    fmt::print("{}\n", json_text(json));
    return;
  }
  fmt::print("{} in {} on {}: prefill of {} tokens, {} at once\n", bench.model, bench.dtype,
             bench.device, how.tokens, how.chunk);
  fmt::print(
      "  {:.3f} ms, {:.0f} tokens/s, {:.0f} TFLOP/s: {:.1f}% of a large product's {:.0f}; logits "
      "{}\n",
      bench.milliseconds, bench.tokens_per_second, bench.flops_per_second() * 1e-12,
      100 * of_matrix, bench.matrix_flops_per_second * 1e-12, bench.logits_xxh3);
}

/// `--policy` and `--budget`: one policy that evicts, at one budget or more.
std::vector<CacheConfig> evicting_from(const po::variables_map& options) {
  std::vector<CacheConfig> grid = grid_from(options);
  for (const CacheConfig& config : grid)
    if (!config.evicts() || config.policy.text() != grid.front().policy.text())
      throw std::invalid_argument("--policy: give one policy that evicts, and its --budget");
  return grid;
}

void run_stream(const po::variables_map& options) {
  const std::vector<CacheConfig> grid = evicting_from(options);
  StreamBenchOptions how{.model = model_from(options),
                         .cache = grid.front(),
                         .budgets = {},
                         .steps = count_from(options, "steps", kMostTokens)};
  for (const CacheConfig& config : grid) {
    if (config.budget.extent.is_share)
      throw std::invalid_argument(
          "--budget: a stream has no length to take a share of; give tokens");
    how.budgets.push_back(config.budget.resolve(0));
  }
  const StreamBench bench = bench_stream(how);
  ordered_json points = ordered_json::array();
  for (const StreamPoint& p : bench.points)
    points.push_back({{"budget", p.budget},
                      {"step_milliseconds", p.step_milliseconds},
                      {"tokens_per_second", 1e3 / p.step_milliseconds},
                      {"recompute_milliseconds", p.recompute_milliseconds},
                      {"ratio", p.ratio()},
                      {"device_bytes", p.device_bytes}});
  if (options["json"].as<bool>()) {
    fmt::print("{}\n", json_text(ordered_json{{"bench", "stream"},
                                              {"model", bench.model},
                                              {"dtype", bench.dtype},
                                              {"device", bench.device},
                                              {"policy", how.cache.policy.text()},
                                              {"positions", name_of(how.cache.positions)},
                                              {"weight_bytes", bench.weight_bytes},
                                              {"points", std::move(points)}}));
    return;
  }
  fmt::print("{} in {} on {}: a stream through {}, positions {}\n", bench.model, bench.dtype,
             bench.device, how.cache.policy.text(), name_of(how.cache.positions));
  fmt::print("  {:>8}{:>12}{:>18}{:>10}{:>14}\n", "cache", "ms/token", "recomputing, ms", "ratio",
             "device, MiB");
  for (const StreamPoint& p : bench.points)
    fmt::print("  {:>8}{:>12.4f}{:>18.3f}{:>9.1f}x{:>14.1f}\n", p.budget, p.step_milliseconds,
               p.recompute_milliseconds, p.ratio(), static_cast<double>(p.device_bytes) / 0x1p20);
}

void run_evict(const po::variables_map& options) {
  const std::vector<CacheConfig> grid = evicting_from(options);
  if (grid.size() != 1) throw std::invalid_argument("--budget: give one");
  EvictBenchOptions how{.model = model_from(options),
                        .cache = {},
                        .batch = static_cast<int>(count_from(options, "batch", kMostRows)),
                        .prompt = count_from(options, "prompt-tokens", kMostTokens),
                        .decoded = count_from(options, "max-new-tokens", kMostTokens)};
  how.cache = resolve(grid.front(), how.prompt + how.decoded);
  const EvictBench bench = bench_evict(how);
  const double time = share(bench.full.decode_seconds, bench.evicting.decode_seconds);
  const double rate =
      share(bench.largest_evicting.tokens_per_second, bench.largest_full.tokens_per_second);
  const auto to_json = [](const EvictRun& run) {
    return ordered_json{{"batch", run.batch},
                        {"decode_seconds", run.decode_seconds},
                        {"tokens_per_second", run.tokens_per_second},
                        {"device_bytes", run.device_bytes}};
  };
  if (options["json"].as<bool>()) {
    fmt::print("{}\n", json_text(ordered_json{{"bench", "evict"},
                                              {"model", bench.model},
                                              {"dtype", bench.dtype},
                                              {"device", bench.device},
                                              {"policy", how.cache.policy.text()},
                                              {"budget_tokens", how.cache.budget_tokens},
                                              {"prompt_tokens", how.prompt},
                                              {"decoded_tokens", how.decoded},
                                              {"full", to_json(bench.full)},
                                              {"evicting", to_json(bench.evicting)},
                                              {"time_ratio", time},
                                              {"largest_full", to_json(bench.largest_full)},
                                              {"largest_evicting", to_json(bench.largest_evicting)},
                                              {"throughput_ratio", rate}}));
    return;
  }
  fmt::print("{} in {} on {}: {} new tokens behind {}, {} at {} tokens\n", bench.model, bench.dtype,
             bench.device, how.decoded, how.prompt, how.cache.policy.text(),
             how.cache.budget_tokens);
  fmt::print("  {:<24}{:>8}{:>14}{:>14}{:>14}\n", "", "batch", "decoding, s", "tokens/s",
             "cache, GiB");
  const auto line = [](std::string_view name, const EvictRun& run) {
    fmt::print("  {:<24}{:>8}{:>14.2f}{:>14.0f}{:>14.2f}\n", name, run.batch, run.decode_seconds,
               run.tokens_per_second, static_cast<double>(run.device_bytes) / 0x1p30);
  };
  line("full cache", bench.full);
  line("evicting", bench.evicting);
  fmt::print("  time in decoding: {:.2f}x less\n", time);
  line("full cache, largest", bench.largest_full);
  line("evicting, largest", bench.largest_evicting);
  fmt::print("  throughput: {:.2f}x\n", rate);
}

int run(const po::variables_map& options) {
  const auto words = options.count("what") ? options["what"].as<std::vector<std::string>>()
                                           : std::vector<std::string>{};
  const std::map<std::string, void (*)(const po::variables_map&)> benches{
      {"decode", run_decode}, {"prefill", run_prefill},           {"stream", run_stream},
      {"evict", run_evict},   {"attention", run_attention_bench}, {"replay", run_bench_replay}};
  if (words.size() != 1 || !benches.contains(words[0]))
    throw std::invalid_argument(
        "what to measure? give one of: decode, prefill, stream, evict, attention, replay");
  if (words[0] == "replay") return run_bench_replay(options), 0;
  if (options.count("device") && device_from(options) == Device::cpu)
    throw std::invalid_argument("--device: bench measures the CUDA decoder; leave it out");
  benches.at(words[0])(options);
  return 0;
}

}  // namespace

Command bench_command() {
  return {.name = "bench",
          .summary = "how fast the CUDA decoder and the replay are, beside what the machine can do",
          .usage =
              "decode|prefill|stream|evict --model DIR|--random-weights CONFIG.json [options]\n"
              "       kvlab bench attention [options]\n"
              "       kvlab bench replay [--trace TRACE] [options]",
          .example = "kvlab bench decode --random-weights engine/models/configs/llama-3.1-8b.json",
          .add_options = add_options,
          .positional = "what",
          .run = run};
}

}  // namespace kvlab
