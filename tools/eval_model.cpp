#include "tools/eval_model.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <stdexcept>

#include "engine/backend.hpp"
#include "engine/checkpoint/model.hpp"
#include "engine/evaluation/device/layered_evaluation.hpp"
#include "sim/device/cuda_replay.hpp"
#include "tools/options.hpp"
#include "tools/turns.hpp"
#include "traces/base/files.hpp"

namespace kvlab {
namespace {

constexpr std::int64_t kMaxTokens = std::int64_t{1} << 30;

std::vector<std::string> paths_of(const po::variables_map& options, const char* name) {
  return options.count(name) ? options[name].as<std::vector<std::string>>()
                             : std::vector<std::string>{};
}

/// The prompt length for texts of `tokens` tokens. The default is at most half of them.
std::uint32_t prompt_tokens_from(const po::variables_map& options, std::int64_t tokens) {
  if (options["prompt-tokens"].defaulted())
    return static_cast<std::uint32_t>(
        std::min(options["prompt-tokens"].as<std::int64_t>(), tokens / 2));
  return count_from(options, "prompt-tokens", 1, tokens - 2);
}

/// The name of a text in traces and tables: its file's name without the extension.
std::string name_of_text(const std::string& path) {
  return std::filesystem::path(path).stem().string();
}

/// A warning if a text is longer than the model's trained context; else "". Traces do not count,
/// because their capture has warned.
std::string note_of_context(const std::vector<EvalText>& texts, const ModelConfig& model) {
  std::size_t longest = 0;
  for (const EvalText& text : texts)
    if (!text.trace) longest = std::max(longest, text.ids.size());
  return context_note(model, static_cast<std::uint32_t>(longest), "--max-tokens");
}

}  // namespace

std::vector<std::int32_t> ids_of_text(const std::string& path, const Tokenizer& tokenizer,
                                      std::size_t tokens) {
  std::vector<std::int32_t> ids = first_ids(path, read_text(path), tokenizer, tokens);
  if (ids.size() < tokens)
    throw std::invalid_argument(
        fmt::format("--text {}: has {} tokens, fewer than --max-tokens {}; give a longer text or a "
                    "smaller --max-tokens",
                    path, ids.size(), tokens));
  return ids;
}

EvalModel load_eval_model(const po::variables_map& options, EvalMethod way) {
  const std::string directory = required(options, "model", "--model DIR, a checkpoint's directory");
  const unsigned threads = threads_from(options);
  EvalModel loaded{.directory = directory,
                   .backend = nullptr,
                   .tokenizer = tokenizer_of(directory, load_model_config(directory))};
  if (device_from(options) == Device::cpu) {
    const Model model = Model::load(directory, threads);
    loaded.backend = cpu_backend(model, threads);
    loaded.run_sweep = layer_sweep_runner(model);
    return loaded;
  }
  loaded.backend = load_backend(Device::cuda, directory, threads);
  Backend& backend = *loaded.backend;
  const bool by_tokens =
      way == EvalMethod::tokens || !beyond_device_layers(backend.config()).empty();
  loaded.run_sweep =
      by_tokens ? token_sweep_runner(backend) : device_layer_sweep_runner(*backend.device_model());
  return loaded;
}

std::shared_ptr<HeadReplayer> eval_replayer(const po::variables_map& options) {
  return device_from(options) == Device::cuda ? cuda_replayer() : nullptr;
}

void add_eval_model_options(po::options_description& options) {
  auto add = options.add_options();
  const auto files = [](const char* name) {
    return po::value<std::vector<std::string>>()->value_name(name)->multitoken();
  };
  add("model", text_option("DIR"), "checkpoint: config.json, safetensors files, tokenizer.json");
  add("text", files("FILE..."), "texts; the first --max-tokens tokens of each are used");
  add("trace", files("TRACE..."),
      "traces of the model, with the features and gradients that were added to them; instead of "
      "texts or in addition");
  add("prompt-tokens", number_option("P", 512),
      "tokens of each text that form its prompt; by default at most half of them");
  add("max-tokens", number_option("T", 2560), "tokens of each text, including the prompt");
  add("output-error", text_option("sample|all", "sample"),
      "measure errors at every eighth query (sample), or at all");
}

void check_eval_model_options(const po::variables_map& options) {
  if (!options.count("text") && !options.count("trace"))
    throw std::invalid_argument(
        "--text: missing; give one or more files: --text FILE, or traces: --trace TRACE");
  const std::int64_t tokens = number_from(options, "max-tokens", 3, kMaxTokens);
  prompt_tokens_from(options, tokens);
  every_output_error_from(options);
  std::set<std::string> names;
  for (const std::string& path : paths_of(options, "text"))
    if (!names.insert(name_of_text(path)).second)
      throw std::invalid_argument(fmt::format(
          "--text: two files are called {}; rename one, because results are listed by this name",
          name_of_text(path)));
}

std::vector<EvalText> eval_texts_from(const po::variables_map& options, const EvalModel& model) {
  const auto tokens = static_cast<std::size_t>(number_from(options, "max-tokens", 3, kMaxTokens));
  const std::uint32_t prompt = prompt_tokens_from(options, static_cast<std::int64_t>(tokens));
  std::vector<EvalText> texts;
  for (const std::string& path : paths_of(options, "text"))
    texts.push_back({.name = name_of_text(path),
                     .ids = ids_of_text(path, model.tokenizer, tokens),
                     .prompt_tokens = prompt});
  for (const std::string& path : paths_of(options, "trace"))
    texts.push_back(text_of_trace(path, model.backend->weights_xxh3(), threads_from(options)));
  std::set<std::string> names;
  for (const EvalText& text : texts)
    if (!names.insert(text.name).second)
      throw std::invalid_argument(
          fmt::format("--trace: two texts or traces are called {}; rename one, because results are "
                      "listed by this name",
                      text.name));
  if (options.count("text")) say_of_model(model.backend->config(), model.tokenizer);
  DistinctTexts distinct = distinct_texts(std::move(texts));
  if (std::string note = note_of_context(distinct.texts, model.backend->config()); !note.empty())
    distinct.warnings.push_back(std::move(note));
  for (const std::string& warning : distinct.warnings) fmt::print(stderr, "kvlab: {}\n", warning);
  return std::move(distinct.texts);
}

void add_task_accuracy_options(po::options_description& options) {
  auto add = options.add_options();
  add("task", text_option("LIST", "passkey,needle"),
      "tasks for the policies that are close in KL, query-agnostic, in order of priority: passkey, "
      "needle, recall; none: no task (the default with --features)");
  add("words", number_option("N", 250),
      "--task: lengths of the context, in words; fewer are used if the full cache itself scores "
      "too low");
  add("samples", number_option("N", 8), "--task: questions at each of five depths");
}

TaskAccuracyPlan task_accuracy_plan_from(const po::variables_map& options) {
  constexpr std::uint32_t kCpuRows = 16, kCudaRows = 128;  // caches in a batch
  const std::uint32_t words = count_from(options, "words", 1, 1'000'000);
  TaskAccuracyPlan plan{.samples = count_from(options, "samples", 1, 100'000),
                        .max_rows = device_from(options) == Device::cuda ? kCudaRows : kCpuRows};
  // Features are for the texts, so questions are skipped unless requested.
  const bool of_texts = options.count("features") > 0 && options["task"].defaulted();
  const auto names = of_texts ? std::vector<std::string>{"none"} : list_from(options, "task");
  if (names == std::vector<std::string>{"none"})
    refuse_given(options, {"words", "samples"}, "--task none evaluates no task");
  else
    for (const std::string& name : names)
      plan.tasks.push_back({{.kind = parse_task_kind(name)}, words});
  return plan;
}

}  // namespace kvlab
