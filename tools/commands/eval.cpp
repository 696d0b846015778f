#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "engine/loop/eval.hpp"
#include "engine/loop/policy_file.hpp"
#include "engine/tokenizer/tokenizer.hpp"
#include "tools/options.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

constexpr std::int64_t kMostTokens = std::int64_t{1} << 30;
constexpr std::size_t kMaxTextBytes = std::size_t{1} << 30;

void add_options(po::options_description& options) {
  auto add = options.add_options();
  add("model", text_option("DIR"), "checkpoint: config.json, safetensors files, tokenizer.json");
  add("text", po::value<std::vector<std::string>>()->value_name("FILE...")->multitoken(),
      "texts to score");
  add("window", number_option("N", 0),
      "tokens a window, the model's first token included; 0: the trained context");
  add("stream", po::bool_switch(), "each text as one sequence");
  add("prompt-tokens", number_option("P", 0),
      "tokens of each sequence that are its prompt; 0: half of it");
  add("max-tokens", number_option("T", 0), "use the first T tokens of each text; 0: all");
  add("span", text_option("decode|all", "decode"),
      "whose predictions are scored: those of decoded tokens, or all");
  add("batched", po::bool_switch(),
      "on a CUDA device, windows and budgets side by side: about 20 times faster for many; "
      "products of many rows round in another order");
  add("no-full", po::bool_switch(),
      "leave out the full cache, and with it KL and top-1: for streams that it could not hold");
  add("block-tokens", number_option("N", 0),
      "also the perplexity of each N scored tokens of a text, in their order; 0: not");
  add_threshold_option(options);
  add("policy-file", text_option("FILE"), "a deployed policy, beside those of --policy");
  add_policy_options(options);
  add_common_options(options);
}

CacheConfig deployed(const std::string& path, const CompiledPolicies& compiled,
                     const ModelConfig& config, const std::string& weights_xxh3) {
  const PolicyFile file = read_policy_file(path, compiled);
  if (const auto warning = model_mismatch(file, config.name, weights_xxh3); !warning.empty())
    fmt::print(stderr, "kvlab eval: {}\n", warning);
  check_shape(file, config.shape());
  return file.cache;
}

nlohmann::ordered_json to_json(const EvalScore& score) {
  const CacheConfig& cache = score.config;
  nlohmann::ordered_json blocks = nlohmann::ordered_json::array();
  for (const EvalBlock& block : score.blocks)
    blocks.push_back({{"first", block.first},
                      {"perplexity", number_or_null(std::exp(block.nll))},
                      {"ms_per_token", number_or_null(block.milliseconds_per_token)}});
  nlohmann::ordered_json json = {{"policy", cache.policy.name},
                                 {"params", cache.policy.params_text()},
                                 {"budget", cache.evicts() ? cache.budget.text() : "all"},
                                 {"budget_tokens", score.budget_tokens},
                                 {"prefill", cache.prefill.text()},
                                 {"positions", name_of(cache.positions)},
                                 {"seed", cache.seed},
                                 {"perplexity", number_or_null(score.perplexity)},
                                 {"perplexity_stderr", number_or_null(score.perplexity_error)},
                                 {"nll", number_or_null(score.nll)},
                                 {"nll_stderr", number_or_null(score.nll_error)},
                                 {"kl", number_or_null(score.kl)},
                                 {"kl_stderr", number_or_null(score.kl_error)},
                                 {"top1_agreement", number_or_null(score.same_first)},
                                 {"tokens", score.tokens},
                                 {"kv_bytes_peak", score.kv_bytes_peak}};
  if (!score.blocks.empty()) json["blocks"] = std::move(blocks);
  return json;
}

void print_table(const std::vector<EvalScore>& scores) {
  fmt::print("{:<40} {:>6} {:>9} {:>20} {:>10} {:>7} {:>12}\n", "policy", "budget", "positions",
             "perplexity", "KL", "top-1", "peak KV");
  for (const EvalScore& score : scores) {
    const std::string error =
        std::isnan(score.perplexity_error) ? "" : fmt::format(" ± {:.3f}", score.perplexity_error);
    const bool against_full = !std::isnan(score.kl);
    fmt::print("{:<40} {:>6} {:>9} {:>20} {:>10} {:>7} {:>8.1f} KiB\n", score.config.policy.text(),
               score.budget_tokens, name_of(score.config.positions),
               fmt::format("{:.3f}{}", score.perplexity, error),
               against_full ? fmt::format("{:.4f}", score.kl) : "-",
               against_full ? fmt::format("{:.1f}%", 100 * score.same_first) : "-",
               static_cast<double>(score.kv_bytes_peak) / 1024);
    for (const EvalBlock& block : score.blocks)
      fmt::print("  from token {:>9} {:>45.3f}{}\n", block.first, std::exp(block.nll),
                 std::isnan(block.milliseconds_per_token)
                     ? ""
                     : fmt::format("  {:.4f} ms/token", block.milliseconds_per_token));
  }
}

std::uint32_t tokens_from(const po::variables_map& options, const char* name) {
  return count_from(options, name, 0, kMostTokens);
}

EvalOptions eval_options(const po::variables_map& options) {
  const std::string span = options["span"].as<std::string>();
  if (span != "decode" && span != "all")
    throw std::invalid_argument(fmt::format("--span '{}': should be decode or all", span));
  if (options["batched"].as<bool>() && device_from(options) == Device::cpu)
    throw std::invalid_argument("--batched: is for a CUDA device; leave it out");
  if (options["batched"].as<bool>() && (span == "all" || tokens_from(options, "block-tokens") > 0))
    throw std::invalid_argument("--batched: scores decoded tokens alone, without --block-tokens");
  return {.window = tokens_from(options, "window"),
          .stream = options["stream"].as<bool>(),
          .prompt_tokens = tokens_from(options, "prompt-tokens"),
          .max_tokens = tokens_from(options, "max-tokens"),
          .span = span == "all" ? Span::all : Span::decode,
          .against_full = !options["no-full"].as<bool>(),
          .block_tokens = tokens_from(options, "block-tokens"),
          .threads = threads_from(options),
          .progress = progress_bar("eval")};
}

/// The model on the device that was asked for.
struct Loaded {
  std::shared_ptr<Backend> backend;  ///< on a device; or null
  ModelConfig config;
  std::string weights_xxh3;
  Sweep sweep;
};

/// On the CPU layer by layer, on a CUDA device token by token or, where it is asked for, in
/// batches.
Loaded load(Device device, const std::string& directory, unsigned threads, bool batched) {
  if (device == Device::cpu) {
    const Model model = Model::load(directory, threads);
    return {nullptr, model.config(), model.weights_xxh3(), sweep_by_layers(model)};
  }
  std::shared_ptr<Backend> backend = load_backend(device, directory, threads);
  return {backend, backend->config(), backend->weights_xxh3(),
          batched ? sweep_by_batches(backend->batches()) : sweep_by_tokens(*backend)};
}

int run(const po::variables_map& options) {
  if (!options.count("text"))
    throw std::invalid_argument("--text: missing; give one or more files: --text FILE");
  const EvalOptions how = eval_options(options);
  threshold_from(options);  // refuses what is out of range, whatever uses it
  std::vector<CacheConfig> configs;
  const auto compiled = policy_sources_from(options);
  if (options.count("policy") || (!compiled.entries.empty() && !options.count("policy-file")))
    configs = grid_from(options, {}, compiled);
  else
    refuse_lone_budget(options);
  const std::string directory = required(options, "model", "--model DIR, a checkpoint's directory");
  const Loaded model =
      load(device_from(options), directory, how.threads, options["batched"].as<bool>());
  const Tokenizer tokenizer = Tokenizer::load(directory + "/tokenizer.json");
  if (options.count("policy-file"))
    configs.push_back(deployed(options["policy-file"].as<std::string>(), compiled, model.config,
                               model.weights_xxh3));

  std::vector<std::vector<std::int32_t>> texts;
  for (const std::string& path : options["text"].as<std::vector<std::string>>())
    texts.push_back(tokenizer.encode(read_text_file(path, kMaxTextBytes), false));
  const std::vector<EvalScore> scores =
      evaluate(model.config, model.sweep, texts, std::move(configs), how);
  if (!options["json"].as<bool>()) {
    print_table(scores);
    return 0;
  }
  nlohmann::ordered_json configurations = nlohmann::ordered_json::array();
  for (const EvalScore& score : scores) configurations.push_back(to_json(score));
  print_json({{"model", model.config.name},
              {"weights_xxh3", model.weights_xxh3},
              {"span", options["span"].as<std::string>()},
              {"configurations", std::move(configurations)}});
  return 0;
}

}  // namespace

Command eval_command() {
  return {.name = "eval",
          .summary = "closed loop: perplexity of many policies and budgets, teacher-forced",
          .usage = "--model DIR --text FILE... [--policy LIST --budget LIST] [options]",
          .example =
              "kvlab eval --model engine/models/tiny --text tools/demo/prompt.txt "
              "--policy window,sink,h2o --budget 64,128 --prefill stream",
          .add_options = add_options,
          .run = run};
}

}  // namespace kvlab
