// The model of commands that run the end-to-end evaluation, and the texts of those that also run
// the offline replay.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/capture.hpp"
#include "engine/evaluation/deploy/deploy.hpp"
#include "engine/evaluation/fidelity/fidelity.hpp"
#include "engine/tokenizer/tokenizer.hpp"
#include "sim/head_replayer.hpp"
#include "tools/command.hpp"

namespace kvlab {

/// How the end-to-end evaluation works on a CUDA device. The CPU always works by layers, which is
/// faster.
enum class EvalMethod { layers, tokens };

/// The model, loaded once on the requested device.
struct EvalModel {
  std::string directory;
  std::unique_ptr<Backend> backend;
  SweepRunner run_sweep;
  Tokenizer tokenizer;
};
EvalModel load_eval_model(const po::variables_map& options, EvalMethod way = EvalMethod::layers);
/// The replayer of that device; null on the CPU.
std::shared_ptr<HeadReplayer> eval_replayer(const po::variables_map& options);

/// The first `tokens` ids of the text that `--text` names, the tokenizer's special tokens included.
/// Throws std::invalid_argument for a shorter text.
std::vector<std::int32_t> ids_of_text(const std::string& path, const Tokenizer& tokenizer,
                                      std::size_t tokens);

/// `--model`, `--text`, `--trace`, `--prompt-tokens`, `--max-tokens`, `--output-error`.
void add_eval_model_options(po::options_description& options);
/// Throws std::invalid_argument if there is neither a text nor a trace, two have one name, or
/// numbers are out of range.
void check_eval_model_options(const po::variables_map& options);
/// The first `--max-tokens` ids of each text, the tokenizer's special tokens included, then the
/// traces. Throws for a shorter text, and for what text_of_trace() refuses.
std::vector<EvalText> eval_texts_from(const po::variables_map& options, const EvalModel& model);

/// `--task`, `--words`, `--samples`: the tasks of finalists.
void add_task_accuracy_options(po::options_description& options);
/// Throws std::invalid_argument for an unknown task.
TaskAccuracyPlan task_accuracy_plan_from(const po::variables_map& options);

}  // namespace kvlab
