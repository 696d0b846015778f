// A model for commands that run the end-to-end evaluation, and the texts of those that run the
// offline replay beside it.
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

/// How an end-to-end evaluation goes on a CUDA device; on the CPU always by layers, which is the
/// fastest.
enum class EvalMethod { layers, tokens };

/// A model on the device that was requested, loaded once.
struct EvalModel {
  std::string directory;
  std::unique_ptr<Backend> backend;
  SweepRunner run_sweep;
  Tokenizer tokenizer;
};
EvalModel load_eval_model(const po::variables_map& options, EvalMethod way = EvalMethod::layers);
/// What replays on that device; null on the CPU.
std::shared_ptr<HeadReplayer> eval_replayer(const po::variables_map& options);

/// The first `tokens` of the text `--text` names, what the tokenizer puts before it included.
/// Throws std::invalid_argument for a text that is shorter.
std::vector<std::int32_t> ids_of_text(const std::string& path, const Tokenizer& tokenizer,
                                      std::size_t tokens);

/// `--model`, `--text`, `--trace`, `--prompt-tokens`, `--max-tokens`, `--output-error`.
void add_eval_model_options(po::options_description& options);
/// Throws std::invalid_argument: neither a text nor a trace, two of one name, numbers out of range.
void check_eval_model_options(const po::variables_map& options);
/// The first `--max-tokens` of each text, what the tokenizer puts before it included; then the
/// traces. Throws for a text that is shorter and for what text_of_trace() refuses.
std::vector<EvalText> eval_texts_from(const po::variables_map& options, const EvalModel& model);

/// `--task`, `--words`, `--samples`: what finalists are asked.
void add_task_accuracy_options(po::options_description& options);
/// Throws std::invalid_argument for an unknown task.
TaskAccuracyPlan task_accuracy_plan_from(const po::variables_map& options);

}  // namespace kvlab
