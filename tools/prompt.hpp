// Prompts: where they come from and how they become token ids.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "engine/checkpoint/model.hpp"
#include "engine/tokenizer/tokenizer.hpp"
#include "tools/command.hpp"

namespace kvlab {

/// `--prompt`, `--prompt-file`.
void add_prompt_options(po::options_description& options);

/// The text of whichever was given. Throws std::invalid_argument unless it is exactly one of them,
/// std::runtime_error for a file that cannot be read.
std::string prompt_from(const po::variables_map& options);

/// Token ids of a sequence's first text, with the special tokens that the tokenizer adds. Where it
/// does not put the model's BOS in front, this does, but for Qwen models, which were trained
/// without.
std::vector<std::int32_t> encode_prompt(const Tokenizer& tokenizer, const ModelConfig& config,
                                        std::string_view text);

}  // namespace kvlab
