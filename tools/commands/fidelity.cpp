#include <fmt/format.h>

#include <cmath>
#include <filesystem>
#include <set>

#include "engine/loop/device/layered_loop.hpp"
#include "engine/loop/fidelity/fidelity.hpp"
#include "engine/output_sketch.hpp"
#include "engine/tokenizer/tokenizer.hpp"
#include "sim/device/cuda_replay.hpp"
#include "sim/run/csv.hpp"
#include "tools/options.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

using nlohmann::ordered_json;

constexpr std::int64_t kMostTokens = std::int64_t{1} << 30;
constexpr std::size_t kMaxTextBytes = std::size_t{1} << 30;

void add_options(po::options_description& options) {
  auto add = options.add_options();
  add("model", text_option("DIR"), "checkpoint: config.json, safetensors files, tokenizer.json");
  add("text", po::value<std::vector<std::string>>()->value_name("FILE...")->multitoken(),
      "texts; the first --max-tokens of each are used");
  add("prompt-tokens", number_option("P", 512), "tokens of each text that are its prompt");
  add("max-tokens", number_option("T", 2560), "tokens of each text, the prompt included");
  add("out", text_option("OUT"),
      "a directory to be made: fidelity.csv, fidelity.json, and a trace of each text");
  add_policy_options(options, true);
  add_common_options(options);
}

std::string label_of(const CacheConfig& config) { return config.policy.text(); }

ordered_json to_json(const FidelityMetric& metric, std::span<const CacheConfig> configs) {
  ordered_json json = {{"within", {}},
                       {"within_low", {}},
                       {"within_high", {}},
                       {"single_text", {}},
                       {"pooled", number_or_null(metric.pooled)},
                       {"regret", {}},
                       {"worst_regret", {}},
                       {"chosen", {}},
                       {"best", {}}};
  for (const FidelityBudget& budget : metric.within) {
    json["within"][budget.budget] = number_or_null(budget.rho);
    json["within_low"][budget.budget] = number_or_null(budget.rho_interval.low);
    json["within_high"][budget.budget] = number_or_null(budget.rho_interval.high);
    json["single_text"][budget.budget] = number_or_null(budget.rho_single);
    json["regret"][budget.budget] = number_or_null(budget.regret);
    json["worst_regret"][budget.budget] = number_or_null(budget.worst_regret);
    json["chosen"][budget.budget] = label_of(configs[budget.chosen]);
    json["best"][budget.budget] = label_of(configs[budget.best]);
  }
  return json;
}

std::string csv_of(std::span<const CacheConfig> configs, std::span<const FidelityText> texts) {
  std::string csv = "text,policy,params,budget,prefill,positions,seed,metric,value\n";
  const auto add = [&](const FidelityText& text, std::size_t c, const std::string& metric,
                       double value) {
    const CacheConfig& config = configs[c];
    if (!std::isfinite(value)) return;
    csv += fmt::format("{},{},{},{},{},{},{},{},{}\n", csv_field(text.name),
                       csv_field(config.policy.name), csv_field(config.policy.params_text()),
                       csv_field(config.budget.text()), config.prefill.text(),
                       name_of(config.positions), config.seed, metric, value);
  };
  for (const FidelityText& text : texts)
    for (std::size_t c = 0; c < configs.size(); ++c) {
      add(text, c, "kl", text.kl[c]);
      for (const auto& [metric, values] : text.figures) add(text, c, metric, values[c]);
    }
  return csv;
}

void print_table(const Fidelity& fidelity) {
  fmt::print("Spearman's rho with the closed loop's KL, within a budget (regret)\n\n{:<16}", "");
  for (const FidelityBudget& budget : fidelity.metrics.front().within)
    fmt::print(" {:>14}", budget.budget);
  fmt::print(" {:>9}\n", "pooled");
  for (const FidelityMetric& metric : fidelity.metrics) {
    fmt::print("{:<16}", metric.metric);
    for (const FidelityBudget& budget : metric.within)
      fmt::print(" {:>14}", fmt::format("{:.2f} ({:.2f})", budget.rho, budget.regret));
    fmt::print(" {:>9.2f}\n", metric.pooled);
  }
  fmt::print("{:<16}", "text by text");
  for (const double rho : fidelity.ceiling)
    fmt::print(" {:>14}", std::isnan(rho) ? "-" : fmt::format("{:.2f}", rho));
  fmt::print("\n");
}

/// The first tokens of each text, behind the model's first token where it has one.
std::vector<std::int32_t> ids_of(const std::string& path, const Tokenizer& tokenizer,
                                 const ModelConfig& config, std::size_t tokens) {
  std::vector<std::int32_t> ids;
  if (config.bos >= 0) ids.push_back(config.bos);
  const auto text = tokenizer.encode(read_text_file(path, kMaxTextBytes), false);
  ids.insert(ids.end(), text.begin(), text.end());
  if (ids.size() < tokens)
    throw std::invalid_argument(fmt::format("--text {}: has {} tokens; --max-tokens asks for {}",
                                            path, ids.size(), tokens));
  ids.resize(tokens);
  return ids;
}

void add_to(ordered_json& json, const Fidelity& fidelity, std::span<const CacheConfig> configs,
            std::span<const FidelityText> texts) {
  json["texts"] = ordered_json::array();
  for (const FidelityText& text : texts) json["texts"].push_back(text.name);
  for (const FidelityMetric& metric : fidelity.metrics)
    json["metrics"][metric.metric] = to_json(metric, configs);
  for (std::size_t b = 0; b < fidelity.ceiling.size(); ++b)
    json["ceiling"][fidelity.metrics.front().within[b].budget] =
        number_or_null(fidelity.ceiling[b]);
}

/// A text's traces and rows go by its file's name without the extension.
std::string name_of_text(const std::string& path) {
  return std::filesystem::path(path).stem().string();
}

void refuse_same_names(const std::vector<std::string>& paths) {
  std::set<std::string> names;
  for (const std::string& path : paths)
    if (!names.insert(name_of_text(path)).second)
      throw std::invalid_argument(
          fmt::format("--text: two files are called {}; rename one, results are told apart by it",
                      name_of_text(path)));
}

/// A folder that appears under its name when all is in it; OUT.part until then.
class Staging {
 public:
  explicit Staging(const std::string& out) : out_(out), part_(out + ".part") {
    refuse_existing(part_.string(), "--out");
  }
  ~Staging() {
    std::error_code ignored;
    std::filesystem::remove_all(part_, ignored);  // nothing, once it is published
  }
  const std::filesystem::path& path() const { return part_; }
  void publish() const { std::filesystem::rename(part_, out_); }

 private:
  std::filesystem::path out_, part_;
};

int run(const po::variables_map& options) {
  if (!options.count("text"))
    throw std::invalid_argument("--text: missing; give one or more files: --text FILE");
  const Device device = device_from(options);
  const unsigned threads = threads_from(options);
  const std::string directory = required(options, "model", "--model DIR, a checkpoint's directory");
  const std::string out = required(options, "out", "--out OUT, a directory to be made");
  refuse_existing(out, "--out");
  const auto tokens = static_cast<std::size_t>(number_from(options, "max-tokens", 3, kMostTokens));
  const std::uint32_t prompt =
      count_from(options, "prompt-tokens", 1, static_cast<std::int64_t>(tokens) - 2);
  const std::vector<CacheConfig> configs = grid_from(options);
  check_fidelity_grid(configs);
  refuse_same_names(options["text"].as<std::vector<std::string>>());

  const auto backend = load_backend(device, directory, threads);
  const Tokenizer tokenizer = Tokenizer::load(directory + "/tokenizer.json");
  const Sweep sweep = device == Device::cuda
                          ? sweep_by_device_layers(*backend->device_model(), backend->batches())
                          : sweep_by_layers(Model::load(directory, threads));
  const auto replayer = device == Device::cuda ? cuda_replayer() : nullptr;
  const auto& paths = options["text"].as<std::vector<std::string>>();
  std::vector<std::vector<std::int32_t>> ids;
  for (const std::string& path : paths)
    ids.push_back(ids_of(path, tokenizer, backend->config(), tokens));

  const OutputSketch sketch = output_sketch(directory, kSketchSeed, threads);
  Staging folder(out);
  const std::filesystem::path traces = folder.path() / "traces";
  std::filesystem::create_directories(traces);
  const auto bar = progress_bar("fidelity");
  std::vector<FidelityText> texts;
  for (std::size_t t = 0; t < paths.size(); ++t) {
    const auto done = [&, t](double part) {
      bar((static_cast<double>(t) + part) / static_cast<double>(paths.size()));
    };
    texts.push_back(measure_fidelity(*backend, sweep, name_of_text(paths[t]), ids[t], configs,
                                     {.prompt_tokens = prompt,
                                      .sketch = sketch,
                                      .traces = traces,
                                      .threads = threads,
                                      .device = replayer.get(),
                                      .progress = done}));
  }
  const Fidelity fidelity = assess_fidelity(configs, texts);

  ordered_json json = {{"model", backend->config().name},
                       {"weights_xxh3", backend->weights_xxh3()},
                       {"tokens", tokens},
                       {"prompt_tokens", prompt}};
  add_to(json, fidelity, configs, texts);
  write_file_atomically(folder.path() / "fidelity.csv", csv_of(configs, texts));
  write_file_atomically(folder.path() / "fidelity.json", json_text(json, 1) + "\n");
  folder.publish();
  if (options["json"].as<bool>())
    print_json(json);
  else
    print_table(fidelity);
  return 0;
}

}  // namespace

Command fidelity_command() {
  return {.name = "fidelity",
          .summary = "which figure of a replay predicts the closed loop of this model",
          .usage = "--model DIR --text FILE... --policy LIST --budget LIST --out OUT [options]",
          .example =
              "kvlab fidelity --model engine/models/tiny --text tools/demo/prompt.txt "
              "--policy window,sink,lru,h2o --budget 64,128 --prompt-tokens 128 --max-tokens 512 "
              "--out fidelity",
          .add_options = add_options,
          .run = run};
}

}  // namespace kvlab
