// Loads the model for the commands that run the end-to-end evaluation. Some of them also run the
// offline replay; for these, also loads the texts.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/capture.hpp"
#include "engine/evaluation/deploy/deploy.hpp"
#include "engine/evaluation/fidelity/fidelity.hpp"
#include "engine/tokenizer/tokenizer.hpp"
#include "sim/head_replayer.hpp"
#include "tools/options.hpp"

namespace kvlab {

/// How the end-to-end evaluation works on a CUDA device: `layers` computes a whole text layer by
/// layer, `tokens` decodes it token by token. The CPU always works by layers, which is faster.
enum class EvalMethod { layers, tokens };

/// The model, loaded once on the requested device.
struct EvalModel {
  std::string directory;
  std::unique_ptr<Backend> backend;
  SweepRunner run_sweep;
  Tokenizer tokenizer;
};
EvalModel load_eval_model(const std::string& directory, const CommonOptions& common,
                          EvalMethod way = EvalMethod::layers);
/// The object that replays heads on a device; null for the CPU, which does not need one.
std::shared_ptr<HeadReplayer> eval_replayer(Device device);

/// The first `tokens` ids of the file `path`, which `--text` names. They include the tokenizer's
/// special tokens. Throws std::invalid_argument if the text is shorter.
std::vector<std::int32_t> ids_of_text(const std::string& path, const Tokenizer& tokenizer,
                                      std::size_t tokens);

/// The model, and the texts and traces that it is evaluated on.
struct EvalModelOptions {
  std::string model;
  std::vector<std::string> texts, traces;  ///< paths
  std::int64_t prompt_tokens = 512;
  std::uint32_t max_tokens = 2560;
  bool every_output_error = false;
};
/// `--model`, `--text`, `--trace`, `--prompt-tokens`, `--max-tokens`, `--output-error`. Throws
/// std::invalid_argument if there is neither a text nor a trace, if two of them have the same name,
/// or if numbers are out of range.
void add_eval_model_options(OptionTable& table, EvalModelOptions& options);
/// The first `--max-tokens` ids of each text, including the tokenizer's special tokens, then the
/// traces. Throws if a text is shorter, and as text_of_trace() does.
std::vector<EvalText> eval_texts(const EvalModelOptions& options, const EvalModel& model,
                                 unsigned threads);

/// The tasks on which `deploy --confirm` and `tune` evaluate the policies that are close in KL.
struct TaskAccuracyOptions {
  std::vector<std::string> tasks{"passkey", "needle"};
  std::uint32_t words = 250;
  TaskAccuracyPlan plan;  ///< complete except for what depends on the device and the seed
};
/// `--task`, `--words`, `--samples`. With `features` there is no task by default. Throws
/// std::invalid_argument for an unknown task.
void add_task_accuracy_options(OptionTable& table, TaskAccuracyOptions& options,
                               const std::vector<std::string>& features);
/// Number of questions that a device answers in one batch. Each has a separate cache.
std::uint32_t task_accuracy_rows(Device device);

}  // namespace kvlab
