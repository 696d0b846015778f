// A model for commands that run the closed loop, and the texts of those that run the open one
// beside it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/capture.hpp"
#include "engine/loop/deploy/deploy.hpp"
#include "engine/loop/fidelity/fidelity.hpp"
#include "engine/tokenizer/tokenizer.hpp"
#include "sim/head_replayer.hpp"
#include "tools/command.hpp"

namespace kvlab {

/// How a closed loop goes on a CUDA device; on the CPU always by layers, which is the fastest.
enum class LoopWay { layers, tokens };

/// A model on the device that was asked for, loaded once.
struct LoopModel {
  std::string directory;
  std::unique_ptr<Backend> backend;
  Sweep sweep;
  Tokenizer tokenizer;
};
LoopModel load_loop_model(const po::variables_map& options, LoopWay way = LoopWay::layers);
/// What replays on that device; null on the CPU.
std::shared_ptr<HeadReplayer> loop_replayer(const po::variables_map& options);

/// The first `tokens` of the text `--text` names, what the tokenizer puts before it included.
/// Throws std::invalid_argument for a text that is shorter.
std::vector<std::int32_t> ids_of_text(const std::string& path, const Tokenizer& tokenizer,
                                      std::size_t tokens);

/// `--model`, `--text`, `--trace`, `--prompt-tokens`, `--max-tokens`, `--output-error`.
void add_loop_options(po::options_description& options);
/// Throws std::invalid_argument: neither a text nor a trace, two of one name, numbers out of range.
void check_loop_options(const po::variables_map& options);
/// The first `--max-tokens` of each text, what the tokenizer puts before it included; then the
/// traces. Throws for a text that is shorter and for what text_of_trace() refuses.
std::vector<LoopText> loop_texts_from(const po::variables_map& options, const LoopModel& model);

/// `--task`, `--words`, `--draws`: what finalists are asked.
void add_answer_options(po::options_description& options);
/// Throws std::invalid_argument for an unknown task.
AnswerPlan answer_plan_from(const po::variables_map& options);

}  // namespace kvlab
