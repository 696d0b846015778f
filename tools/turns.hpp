// Options of what is fed to a model: a prompt, further turns, and how answers are sampled.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/decoder.hpp"
#include "engine/sampler.hpp"
#include "engine/tokenizer/tokenizer.hpp"
#include "tools/command.hpp"

namespace kvlab {

/// `--prompt`, `--prompt-file`.
void add_prompt_options(po::options_description& options);
/// The text of whichever was given. Throws std::invalid_argument unless it is exactly one of them,
/// std::runtime_error for a file that cannot be read.
std::string prompt_from(const po::variables_map& options);

/// `--beyond-context`: check_context() refuses nothing.
void add_context_option(po::options_description& options);
/// Refuses prompts that are longer than what the model was trained on. Returns what to warn of: that
/// the answers will be.
std::string check_context(const po::variables_map& options, const ModelConfig& config,
                          const ResolvedConfig& cache,
                          const std::vector<std::vector<std::int32_t>>& turns);

/// `--max-new-tokens`, `--turn`, `--temperature`, `--top-k`, `--top-p`.
void add_turn_options(po::options_description& options);
/// Throws std::invalid_argument for a number out of range; `--seed` is read too.
SamplingOptions sampling_from(const po::variables_map& options);
std::uint32_t max_new_tokens_from(const po::variables_map& options);
/// The ids of each turn: `first`, then those of `--turn`, in order. Throws std::invalid_argument
/// for a turn without tokens.
std::vector<std::vector<std::int32_t>> turns_from(const po::variables_map& options,
                                                  const Tokenizer& tokenizer,
                                                  std::vector<std::int32_t> first);

}  // namespace kvlab
