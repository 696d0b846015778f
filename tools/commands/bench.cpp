#include "engine/bench.hpp"

#include <fmt/format.h>

#include <charconv>
#include <map>
#include <stdexcept>

#include "engine/loop/device/layered_loop.hpp"
#include "tools/commands/bench_replay.hpp"
#include "tools/figures.hpp"
#include "tools/options.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

using nlohmann::ordered_json;

constexpr std::int64_t kMostTokens = 1 << 28, kMostRows = 1 << 16, kMostSlots = 1 << 20;

void add_options(po::options_description& options) {
  auto add = options.add_options();
  add("what",
      po::value<std::vector<std::string>>()->value_name(
          "decode|prefill|stream|evict|loop|attention|replay"),
      "what to measure");
  add("model", text_option("DIR"), "a checkpoint");
  add("random-weights", text_option("CONFIG.json"),
      "or the shape of one, with weights drawn on the device: engine/models/configs/*.json");
  add("batch", number_option("N", 1), "decode, evict: sequences");
  add("context", number_option("N", 1024), "decode: tokens in each sequence at the start");
  add("steps", number_option("N", 64), "decode: steps that are timed");
  add("capture", text_option("TRACE"),
      "decode: also time sampling with and without capture into this new trace");
  add("tokens", number_option("N", 4096), "prefill: of the prompt; loop: of the sequence");
  add("chunk", number_option("N", 2048), "prefill: tokens at once");
  add("prompt-tokens", number_option("N", 2048),
      "evict, loop: tokens in each sequence at the start");
  add("max-new-tokens", number_option("N", 2048), "evict: tokens that each sequence decodes");
  add("head-size", text_option("LIST"), "attention: 64, 96, 128, 256");
  add("group", text_option("LIST"), "attention: query heads for each of 8 KV heads");
  add("sequences", text_option("LIST"), "attention: sequences");
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
    throw std::invalid_argument("--model: give either --model DIR or --random-weights CONFIG.json");
  return model;
}

ordered_json decode(const po::variables_map& options) {
  DecodeBenchOptions how{.model = model_from(options),
                         .batch = static_cast<int>(count_from(options, "batch", 1, kMostRows)),
                         .context = count_from(options, "context", 1, kMostTokens),
                         .steps = count_from(options, "steps", 1, kMostTokens),
                         .capture = {}};
  if (options.count("capture")) {
    how.capture = options["capture"].as<std::string>();
    refuse_existing(how.capture, "--capture");
  }
  return bench_decode(how);
}

ordered_json prefill(const po::variables_map& options) {
  const std::uint32_t tokens = count_from(options, "tokens", 1, kMostTokens);
  return bench_prefill({.model = model_from(options),
                        .tokens = tokens,
                        .chunk = count_from(options, "chunk", 1, kMostTokens),
                        .cache = resolve(only_config(options), tokens)});
}

/// `--policy` and `--budget`: one policy that evicts, at one budget or more.
std::vector<CacheConfig> evicting_from(const po::variables_map& options) {
  std::vector<CacheConfig> grid = grid_from(options);
  for (const CacheConfig& config : grid)
    if (!config.evicts() || config.policy.text() != grid.front().policy.text())
      throw std::invalid_argument("--policy: give one policy that evicts, and its --budget");
  return grid;
}

ordered_json stream(const po::variables_map& options) {
  const std::vector<CacheConfig> grid = evicting_from(options);
  StreamBenchOptions how{.model = model_from(options),
                         .cache = grid.front(),
                         .budgets = {},
                         .steps = count_from(options, "steps", 1, kMostTokens)};
  for (const CacheConfig& config : grid) {
    if (config.budget.extent.is_share || config.budget.in_bytes || !config.budget.is_even() ||
        config.budget.all)
      throw std::invalid_argument(
          "--budget: a stream has no length to take a share of; give tokens");
    how.budgets.push_back(config.budget.resolve(0, 0));
  }
  return bench_stream(how);
}

ordered_json loop(const po::variables_map& options) {
  LoopBenchOptions how{.model = model_from(options),
                       .configs = grid_from(options),
                       .tokens = count_from(options, "tokens", 4, kMostTokens),
                       .threads = threads_from(options)};
  how.prompt_tokens = count_from(options, "prompt-tokens", 1, how.tokens - 2);
  how.configs.insert(how.configs.begin(), CacheConfig{});
  return bench_loop(how);
}

ordered_json evict(const po::variables_map& options) {
  const std::vector<CacheConfig> grid = evicting_from(options);
  if (grid.size() != 1) throw std::invalid_argument("--budget: give one");
  EvictBenchOptions how{.model = model_from(options),
                        .cache = {},
                        .batch = static_cast<int>(count_from(options, "batch", 1, kMostRows)),
                        .prompt = count_from(options, "prompt-tokens", 1, kMostTokens),
                        .decoded = count_from(options, "max-new-tokens", 1, kMostTokens)};
  how.cache = resolve(grid.front(), how.prompt + how.decoded);
  return bench_evict(how);
}

/// What it is already, if the option was not given.
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
  AttentionBenchOptions how{.slots = count_from(options, "slots", 4, kMostSlots)};
  if (options.count("policy")) how.policies = list_from(options, "policy");
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
      {"attention", attention}, {"replay", bench_replay}, {"loop", loop}};
  if (words.size() != 1 || !benches.contains(words[0]))
    throw std::invalid_argument(
        "what to measure? give one of: decode, prefill, stream, evict, loop, attention, replay");
  if (words[0] != "replay" && options.count("device") && device_from(options) == Device::cpu)
    throw std::invalid_argument("--device: bench measures the CUDA decoder; leave it out");
  const ordered_json figures = benches.at(words[0])(options);
  if (options["json"].as<bool>())
    print_json(figures);
  else
    print_figures(figures);
  return 0;
}

}  // namespace

Command bench_command() {
  return {
      .name = "bench",
      .summary = "how fast the CUDA decoder and the replay are, beside what the machine can do",
      .usage =
          "decode|prefill|stream|evict|loop --model DIR|--random-weights CONFIG.json [options]\n"
          "       kvlab bench attention [options]\n"
          "       kvlab bench replay [--trace TRACE] [options]",
      .example = "kvlab bench replay --trace traces/samples/tiny-story",
      .add_options = add_options,
      .positional = "what",
      .run = run};
}

}  // namespace kvlab
