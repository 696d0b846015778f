#include "tools/eval_model.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <stdexcept>

#include "engine/backend.hpp"
#include "engine/checkpoint/model.hpp"
#include "engine/evaluation/device/layered_evaluation.hpp"
#include "policies/executor.hpp"
#include "sim/device/cuda_replay.hpp"
#include "tools/turns.hpp"
#include "traces/base/files.hpp"

namespace kvlab {
namespace {

constexpr std::int64_t kMaxTokens = std::int64_t{1} << 30;

/// The name of a text in traces and tables: its file's name without the extension.
std::string name_of_text(const std::string& path) {
  return std::filesystem::path(path).stem().string();
}

/// A warning if a text is longer than the model's trained context; otherwise "". Traces do not
/// count, because their capture already gave the warning.
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

/// A runner that works by layers if the evaluation on a device supports all configurations, and by
/// tokens otherwise.
SweepRunner device_sweep_runner(Backend& backend) {
  return [by_layers = device_layer_sweep_runner(*backend.device_model()),
          by_tokens = token_sweep_runner(backend)](
             const std::vector<std::vector<std::int32_t>>& sequences,
             std::span<const CacheConfig> configs, const EvalOptions& options) {
    const bool supported = std::ranges::all_of(configs, [](const CacheConfig& config) {
      return refusal(kCudaEvaluation, config).empty();
    });
    return (supported ? by_layers : by_tokens)(sequences, configs, options);
  };
}

EvalModel load_eval_model(const std::string& directory, const CommonOptions& common,
                          EvalMethod way) {
  EvalModel loaded{.directory = directory,
                   .backend = nullptr,
                   .tokenizer = tokenizer_of(directory, load_model_config(directory))};
  if (common.device == Device::cpu) {
    const Model model = Model::load(directory, common.threads);
    loaded.backend = cpu_backend(model, common.threads);
    loaded.run_sweep = layer_sweep_runner(model);
    return loaded;
  }
  loaded.backend = load_backend(Device::cuda, directory, common.threads);
  Backend& backend = *loaded.backend;
  const bool by_tokens =
      way == EvalMethod::tokens || !beyond_device_layers(backend.config()).empty();
  loaded.run_sweep = by_tokens ? token_sweep_runner(backend) : device_sweep_runner(backend);
  return loaded;
}

std::shared_ptr<HeadReplayer> eval_replayer(Device device) {
  return device == Device::cuda ? cuda_replayer() : nullptr;
}

namespace {

void check_eval_model(EvalModelOptions& options, const GivenOptions& given) {
  if (options.texts.empty() && options.traces.empty())
    throw std::invalid_argument(
        "--text: missing; give one or more files: --text FILE, or traces: --trace TRACE");
  if (given.has("prompt-tokens"))
    check_range("prompt-tokens", options.prompt_tokens, {1, options.max_tokens - 2});
  else
    options.prompt_tokens = std::min<std::int64_t>(options.prompt_tokens, options.max_tokens / 2);
  std::set<std::string> names;
  for (const std::string& path : options.texts)
    if (!names.insert(name_of_text(path)).second)
      throw std::invalid_argument(fmt::format(
          "--text: two files are called {}; rename one, because results are listed by this name",
          name_of_text(path)));
}

}  // namespace

void add_eval_model_options(OptionTable& table, EvalModelOptions& options) {
  add_model_option(table, options.model);
  table.texts("text", "FILE...", Takes::several_words, options.texts,
              "texts; the first --max-tokens tokens of each are used");
  table.texts("trace", "TRACE...", Takes::several_words, options.traces,
              "traces of the model, instead of texts or in addition to them. Features and "
              "gradients that were added to a trace are used");
  table.whole("prompt-tokens", "P", kAnyNumber, options.prompt_tokens,
              "tokens of each text that form its prompt; by default at most half of them");
  table.whole("max-tokens", "T", {3, kMaxTokens}, options.max_tokens,
              "tokens of each text, including the prompt");
  add_output_error_option(table, options.every_output_error,
                          "measure errors at every eighth query (sample), or at all queries (all)");
  table.check([&options](const GivenOptions& given) { check_eval_model(options, given); });
}

std::vector<EvalText> eval_texts(const EvalModelOptions& options, const EvalModel& model,
                                 unsigned threads) {
  std::vector<EvalText> texts;
  for (const std::string& path : options.texts)
    texts.push_back({.name = name_of_text(path),
                     .ids = ids_of_text(path, model.tokenizer, options.max_tokens),
                     .prompt_tokens = static_cast<std::uint32_t>(options.prompt_tokens)});
  for (const std::string& path : options.traces)
    texts.push_back(text_of_trace(path, model.backend->weights_xxh3(), threads));
  std::set<std::string> names;
  for (const EvalText& text : texts)
    if (!names.insert(text.name).second)
      throw std::invalid_argument(
          fmt::format("--trace: two texts or traces are called {}; rename one, because results are "
                      "listed by this name",
                      text.name));
  if (!options.texts.empty()) say_of_model(model.backend->config(), model.tokenizer);
  DistinctTexts distinct = distinct_texts(std::move(texts));
  if (std::string note = note_of_context(distinct.texts, model.backend->config()); !note.empty())
    distinct.warnings.push_back(std::move(note));
  for (const std::string& warning : distinct.warnings) fmt::print(stderr, "kvlab: {}\n", warning);
  return std::move(distinct.texts);
}

void add_task_accuracy_options(OptionTable& table, TaskAccuracyOptions& options,
                               const std::vector<std::string>& features) {
  table.list("task", "LIST", options.tasks,
             "tasks that decide among the policies that are close in KL, in order of priority: "
             "passkey, needle, recall. Their questions come after the eviction. none: no task (the "
             "default with --features)");
  table.whole("words", "N", {1, 1'000'000}, options.words,
              "--task: length of the context, in words; it is reduced if the full cache itself "
              "scores too low");
  table.whole("samples", "N", {1, 100'000}, options.plan.samples,
              "--task: questions at each of five depths");
  table.check([&options, &features](const GivenOptions& given) {
    // --features gives features of the texts. The questions of a task have no such features, so no
    // task is evaluated unless --task requests one.
    if (!features.empty() && !given.has("task")) options.tasks = {"none"};
    if (options.tasks == std::vector<std::string>{"none"})
      return given.refuse({"words", "samples"}, "--task none evaluates no task");
    for (const std::string& name : options.tasks) {
      const TaskKind kind = parse_task_kind(name);
      if (kind == TaskKind::ruler)
        throw std::invalid_argument(
            "--task: ruler is measured by kvlab task only; give passkey, needle or recall");
      options.plan.tasks.push_back({{.kind = kind}, options.words});
    }
  });
}

std::uint32_t task_accuracy_rows(Device device) { return device == Device::cuda ? 128 : 16; }

}  // namespace kvlab
