#include "tools/turns.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <new>
#include <stdexcept>

#include "engine/checkpoint/checkpoint.hpp"
#include "engine/evaluation/conversation.hpp"
#include "engine/tokenizer/text.hpp"
#include "tools/options.hpp"
#include "traces/base/json.hpp"
#include "traces/base/safetensors.hpp"
#include "traces/base/text.hpp"

namespace kvlab {
namespace {

constexpr std::int64_t kMaxTokens = 1 << 30;
constexpr std::size_t kMaxPromptBytes = std::size_t{1} << 30;

/// Calls `encode` and names the text in its errors.
template <class Encode>
std::vector<std::int32_t> name_errors(const std::string& name, Encode encode) {
  try {
    return encode();
  } catch (const std::bad_alloc&) {
    throw std::runtime_error(name + ": out of memory with this text; a shorter one may fit");
  }
}

bool begins_itself(const Tokenizer& tokenizer, std::string_view text) {
  return common_prefix_length(tokenizer.encode(text, false, 1), tokenizer.before()) > 0;
}

}  // namespace

Tokenizer tokenizer_of(const std::string& directory, const ModelConfig& config) {
  constexpr std::string_view kOthers[] = {".model", "vocab.json", "tekken.json", "vocab.txt"};
  if (!std::filesystem::exists(directory + "/tokenizer.json"))
    refuse_other_files(directory, "tokenizer.json", kOthers);
  return Tokenizer::load(directory + "/tokenizer.json", config.vocab);
}

void say_of_model(const ModelConfig& config, const Tokenizer& tokenizer, std::string_view prompt,
                  bool has_chat_template) {
  const std::string unknown = fmt::format("{}", fmt::join(config.unknown_keys, ", "));
  if (!unknown.empty())
    fmt::print(stderr, "kvlab: {}: unknown keys of config.json are ignored: {}\n", config.name,
               printable(unknown));
  if (begins_itself(tokenizer, prompt))
    fmt::print(
        stderr,
        "kvlab: the prompt already begins with the tokenizer's first token, so none is added\n");
  if (tokenizer.before().empty() && config.bos >= 0 && !has_chat_template)
    fmt::print(stderr,
               "kvlab: {}: tokenizer.json adds no first token to a text, so the text begins "
               "without one (bos_token_id of config.json is {})\n",
               config.name, config.bos);
}

std::vector<std::int32_t> first_ids(const std::string& name, std::string_view text,
                                    const Tokenizer& tokenizer, std::size_t max_ids) {
  return name_errors(name, [&] { return encode_prompt(tokenizer, text, max_ids); });
}

std::vector<std::int32_t> ids_of_file(const std::string& path, const Tokenizer& tokenizer,
                                      std::size_t max_ids) {
  return name_errors(path, [&] { return tokenizer.encode(read_text(path), false, max_ids); });
}

nlohmann::json first_token(const Tokenizer& tokenizer, std::string_view text) {
  if (tokenizer.before().empty()) return nullptr;
  return {{"id", tokenizer.before().front()},
          {"by", begins_itself(tokenizer, text) ? "text" : "tokenizer"}};
}

void add_prompt_options(OptionTable& table, PromptOptions& prompt) {
  table.text("prompt", "TEXT", prompt.text, "the prompt");
  table.text("prompt-file", "FILE", prompt.file, "a file that holds the prompt");
}

void add_context_option(OptionTable& table, bool& beyond_context) {
  table.flag("beyond-context", beyond_context,
             "allow a prompt longer than the context that the model was trained on");
}

std::string check_context(bool beyond_context, std::uint32_t max_new_tokens,
                          const ModelConfig& config, const ResolvedConfig& cache,
                          const std::vector<std::vector<std::int32_t>>& turns) {
  const auto longest = static_cast<std::uint32_t>(
      std::ranges::max_element(turns, {}, &std::vector<std::int32_t>::size)->size());
  const std::string advice = cache_positions_advice(config);
  if (!beyond_context)
    refuse_beyond_context(config, needed_positions(cache, longest, max_tokens(turns, 0)), advice);
  const std::uint32_t length = max_tokens(turns, max_new_tokens);
  return context_warning(config, needed_positions(cache, longest, length), advice);
}

std::string PromptOptions::name() const {
  return file.empty() ? "--prompt" : "--prompt-file " + file;
}

std::string PromptOptions::read() const {
  const bool both = text && !file.empty();
  if (both || (!text && file.empty()))
    throw std::invalid_argument(
        both ? "--prompt and --prompt-file: give one of them, not both"
             : "--prompt: missing; give --prompt TEXT or --prompt-file FILE");
  const std::string prompt = text ? *text : read_text_file(file, kMaxPromptBytes);
  if (prompt.empty())
    throw std::invalid_argument(fmt::format("{}: is empty; give some text", name()));
  if (const std::size_t good = tokenizer::valid_bytes(prompt); good < prompt.size())
    fmt::print(
        stderr,
        "kvlab: the prompt is not valid UTF-8 at byte {}; invalid bytes are read as U+FFFD\n",
        good);
  return prompt;
}

void add_turn_options(OptionTable& table, TurnOptions& options) {
  table.whole("max-new-tokens", "N", {0, kMaxTokens}, options.max_new_tokens,
              "maximum number of tokens to sample after each turn");
  table.texts("turn", "TEXT", Takes::one_word, options.turns,
              "a further turn of the user, after the model's answer. The model answers it, too. "
              "May be given several times");
  table.number("temperature", "T", options.sampling.temperature,
               "sampling temperature (0: always the most likely token)");
  table.whole("top-k", "K", {0, kMaxTokens}, options.sampling.top_k,
              "sample from the K most likely tokens (0: from all)");
  table.number("top-p", "P", options.sampling.top_p,
               "sample from the most likely tokens that together reach this probability");
  table.check([&options](const GivenOptions&) {
    Sampler{options.sampling};  // refuses values out of range before a model is loaded
  });
}

std::vector<std::vector<std::int32_t>> ids_of_turns(const std::vector<std::string>& turns,
                                                    const Tokenizer& tokenizer,
                                                    std::vector<std::int32_t> first) {
  if (first.empty())
    throw std::invalid_argument("--prompt: the text has no tokens; give some text");
  std::vector<std::vector<std::int32_t>> ids{std::move(first)};
  for (const std::string& text : turns) {
    ids.push_back(tokenizer.encode(text, false));
    if (ids.back().empty())
      throw std::invalid_argument("--turn: the text has no tokens; give some text");
  }
  return ids;
}

}  // namespace kvlab
