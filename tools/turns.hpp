// Options for the text that a model reads (a prompt and further turns) and for sampling its
// answers.
#pragma once

#include <cstdint>
#include <limits>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "engine/checkpoint/model.hpp"
#include "engine/decoder.hpp"
#include "engine/sampler.hpp"
#include "engine/tokenizer/tokenizer.hpp"
#include "tools/option_table.hpp"

namespace kvlab {

/// The prompt: a text, or the text of a file.
struct PromptOptions {
  std::optional<std::string> text;
  std::string file;

  /// The prompt's name in errors: "--prompt", or the file.
  std::string name() const;
  /// Returns the text. Throws std::invalid_argument unless exactly one of the options was given and
  /// the text is not empty. Throws std::runtime_error if the file cannot be read.
  std::string read() const;
};
/// `--prompt`, `--prompt-file`.
void add_prompt_options(OptionTable& table, PromptOptions& prompt);

/// Loads the tokenizer of the model in `directory`. Throws std::runtime_error as Tokenizer::load()
/// does; if the folder has another kind of tokenizer, the message names it.
Tokenizer tokenizer_of(const std::string& directory, const ModelConfig& config);
/// Prints notes to stderr. It names keys of config.json that kvlab does not know. It says if the
/// prompt already begins with the tokenizer's first token. It says if config.json names a first
/// token that the tokenizer does not add, unless a chat template writes this token. Call it after
/// the last check that may fail.
void say_of_model(const ModelConfig& config, const Tokenizer& tokenizer,
                  std::string_view prompt = "", bool has_chat_template = false);
constexpr std::size_t kAllTokens = std::numeric_limits<std::size_t>::max();
/// The first `max_ids` ids of a text that begins a sequence; see encode_prompt(). If memory runs
/// out, throws std::runtime_error with the text's `name`.
std::vector<std::int32_t> first_ids(const std::string& name, std::string_view text,
                                    const Tokenizer& tokenizer, std::size_t max_ids = kAllTokens);
/// The first `max_ids` ids of a file's text, without special tokens before or after them. Otherwise
/// like first_ids().
std::vector<std::int32_t> ids_of_file(const std::string& path, const Tokenizer& tokenizer,
                                      std::size_t max_ids = kAllTokens);
/// For JSON: the id of a sequence's first token, and whether the tokenizer added this token or the
/// text contains it. null if the tokenizer has no first token.
nlohmann::json first_token(const Tokenizer& tokenizer, std::string_view text = "");

/// The user's turns in a conversation, and how the answers are sampled.
struct TurnOptions {
  std::uint32_t max_new_tokens = 100;
  std::vector<std::string> turns;  ///< after the prompt
  SamplingOptions sampling;
};
/// `--max-new-tokens`, `--turn`, `--temperature`, `--top-k`, `--top-p`. Throws
/// std::invalid_argument for a number out of range.
void add_turn_options(OptionTable& table, TurnOptions& options);
/// The ids of each turn: `first`, then those of `turns`, in order. Throws std::invalid_argument for
/// a turn without tokens.
std::vector<std::vector<std::int32_t>> ids_of_turns(const std::vector<std::string>& turns,
                                                    const Tokenizer& tokenizer,
                                                    std::vector<std::int32_t> first);

/// `--beyond-context`.
void add_context_option(OptionTable& table, bool& beyond_context);
/// Refuses prompts that are longer than the context that the model was trained on, unless
/// `beyond_context` is set. Returns a warning if the prompts and answers together may be longer;
/// otherwise "".
std::string check_context(bool beyond_context, std::uint32_t max_new_tokens,
                          const ModelConfig& config, const ResolvedConfig& cache,
                          const std::vector<std::vector<std::int32_t>>& turns);

}  // namespace kvlab
