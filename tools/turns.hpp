// Options for what is fed to a model: a prompt, further turns, and how answers are sampled.
#pragma once

#include <cstdint>
#include <limits>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "engine/checkpoint/model.hpp"
#include "engine/decoder.hpp"
#include "engine/sampler.hpp"
#include "engine/tokenizer/tokenizer.hpp"
#include "tools/command.hpp"

namespace kvlab {

/// `--prompt`, `--prompt-file`.
void add_prompt_options(po::options_description& options);
/// The text of the option that was given. Throws std::invalid_argument unless exactly one was,
/// std::runtime_error for a file that cannot be read.
std::string prompt_from(const po::variables_map& options);
/// The prompt's name in errors: "--prompt", or the file.
std::string prompt_name(const po::variables_map& options);

/// Loads the tokenizer of the model in `directory`. Throws std::runtime_error as Tokenizer::load()
/// does, or that names another kind of tokenizer there.
Tokenizer tokenizer_of(const std::string& directory, const ModelConfig& config);
/// Prints notes to stderr: keys of config.json that are not known; that the prompt already begins
/// with the tokenizer's first token; or (unless a chat template writes it) that the tokenizer has
/// no first token although config.json names one. Call it after the last check that may fail.
void say_of_model(const ModelConfig& config, const Tokenizer& tokenizer,
                  std::string_view prompt = "", bool has_chat_template = false);
constexpr std::size_t kAllTokens = std::numeric_limits<std::size_t>::max();
/// The first `most` ids of a text that begins a sequence, as encode_prompt(). Prints a note if the
/// text already begins with the tokenizer's first token. Throws std::runtime_error that names the
/// text if memory runs out.
std::vector<std::int32_t> first_ids(const std::string& name, std::string_view text,
                                    const Tokenizer& tokenizer, std::size_t most = kAllTokens);
/// The first `most` ids of a file without surrounding special tokens. Otherwise as first_ids().
std::vector<std::int32_t> ids_of_file(const std::string& path, const Tokenizer& tokenizer,
                                      std::size_t most = kAllTokens);
/// For JSON: the id of a sequence's first token and whether the tokenizer added it or the text
/// contains it; null if the tokenizer has none.
nlohmann::json first_token(const Tokenizer& tokenizer, std::string_view text = "");

/// `--beyond-context`: check_context() refuses nothing.
void add_context_option(po::options_description& options);
/// Refuses prompts that are longer than the trained context. Returns a warning if answers will
/// exceed it.
std::string check_context(const po::variables_map& options, const ModelConfig& config,
                          const ResolvedConfig& cache,
                          const std::vector<std::vector<std::int32_t>>& turns);

/// `--max-new-tokens`, `--turn`, `--temperature`, `--top-k`, `--top-p`.
void add_turn_options(po::options_description& options);
/// Reads the sampling options and `--seed`. Throws std::invalid_argument for a number out of range.
SamplingOptions sampling_from(const po::variables_map& options);
std::uint32_t max_new_tokens_from(const po::variables_map& options);
/// The ids of each turn: `first`, then those of `--turn`, in order. Throws std::invalid_argument
/// for a turn without tokens.
std::vector<std::vector<std::int32_t>> turns_from(const po::variables_map& options,
                                                  const Tokenizer& tokenizer,
                                                  std::vector<std::int32_t> first);

}  // namespace kvlab
