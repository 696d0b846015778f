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
std::vector<std::int32_t> named(const std::string& name, Encode encode) {
  try {
    return encode();
  } catch (const std::bad_alloc&) {
    throw std::runtime_error(name + ": out of memory with this text; a shorter one may fit");
  }
}

bool begins_itself(const Tokenizer& tokenizer, std::string_view text) {
  return begun_with(tokenizer.encode(text, false, 1), tokenizer.before()) > 0;
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
    fmt::print(stderr,
               "kvlab: {}: keys of config.json that are not known, and therefore ignored: {}\n",
               config.name, printable(unknown));
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
                                    const Tokenizer& tokenizer, std::size_t most) {
  return named(name, [&] { return encode_prompt(tokenizer, text, most); });
}

std::vector<std::int32_t> ids_of_file(const std::string& path, const Tokenizer& tokenizer,
                                      std::size_t most) {
  return named(path, [&] { return tokenizer.encode(read_text(path), false, most); });
}

nlohmann::json first_token(const Tokenizer& tokenizer, std::string_view text) {
  if (tokenizer.before().empty()) return nullptr;
  return {{"id", tokenizer.before().front()},
          {"by", begins_itself(tokenizer, text) ? "text" : "tokenizer"}};
}

void add_prompt_options(po::options_description& options) {
  auto add = options.add_options();
  add("prompt", text_option("TEXT"), "the prompt");
  add("prompt-file", text_option("FILE"), "a file that holds the prompt");
}

void add_context_option(po::options_description& options) {
  options.add_options()("beyond-context", po::bool_switch(),
                        "allow a prompt longer than the context that the model was trained on");
}

std::string check_context(const po::variables_map& options, const ModelConfig& config,
                          const ResolvedConfig& cache,
                          const std::vector<std::vector<std::int32_t>>& turns) {
  const auto longest = static_cast<std::uint32_t>(
      std::ranges::max_element(turns, {}, &std::vector<std::int32_t>::size)->size());
  const std::string advice = cache_positions_advice(config);
  if (!options["beyond-context"].as<bool>())
    refuse_beyond_context(config, needed_positions(cache, longest, max_tokens(turns, 0)), advice);
  const std::uint32_t length = max_tokens(turns, max_new_tokens_from(options));
  return context_warning(config, needed_positions(cache, longest, length), advice);
}

std::string prompt_from(const po::variables_map& options) {
  const bool text = options.count("prompt") > 0, file = options.count("prompt-file") > 0;
  if (text == file)
    throw std::invalid_argument(
        text ? "--prompt and --prompt-file: give one of them, not both"
             : "--prompt: missing; give --prompt TEXT or --prompt-file FILE");
  const std::string prompt =
      text ? options["prompt"].as<std::string>()
           : read_text_file(options["prompt-file"].as<std::string>(), kMaxPromptBytes);
  if (prompt.empty())
    throw std::invalid_argument(fmt::format("{}: is empty; give some text", prompt_name(options)));
  if (const std::size_t good = tokenizer::valid_bytes(prompt); good < prompt.size())
    fmt::print(stderr,
               "kvlab: the prompt is not UTF-8 from byte {} on; what is not is read as U+FFFD\n",
               good);
  return prompt;
}

std::string prompt_name(const po::variables_map& options) {
  if (!options.count("prompt-file")) return "--prompt";
  return "--prompt-file " + options["prompt-file"].as<std::string>();
}

void add_turn_options(po::options_description& options) {
  auto add = options.add_options();
  add("max-new-tokens", number_option("N", 100),
      "maximum number of tokens to sample after each turn");
  add("turn", po::value<std::vector<std::string>>()->composing()->value_name("TEXT"),
      "another turn of the user, which is fed after the answer and answered; may be given several "
      "times");
  add("temperature", po::value<double>()->value_name("T")->default_value(0, "0"),
      "sampling temperature (0: always the most likely token)");
  add("top-k", number_option("K", 0), "sample from the K most likely tokens (0: from all)");
  add("top-p", po::value<double>()->value_name("P")->default_value(1, "1"),
      "sample from the most likely tokens that together reach this probability");
}

SamplingOptions sampling_from(const po::variables_map& options) {
  const SamplingOptions sampling{.temperature = options["temperature"].as<double>(),
                                 .top_k = count_from(options, "top-k", 0, kMaxTokens),
                                 .top_p = options["top-p"].as<double>(),
                                 .seed = seed_from(options)};
  Sampler{sampling};  // refuses values out of range before a model is loaded
  return sampling;
}

std::uint32_t max_new_tokens_from(const po::variables_map& options) {
  return count_from(options, "max-new-tokens", 0, kMaxTokens);
}

std::vector<std::vector<std::int32_t>> turns_from(const po::variables_map& options,
                                                  const Tokenizer& tokenizer,
                                                  std::vector<std::int32_t> first) {
  if (first.empty())
    throw std::invalid_argument("--prompt: the text has no tokens; give some text");
  std::vector<std::vector<std::int32_t>> turns{std::move(first)};
  if (!options.count("turn")) return turns;
  for (const std::string& text : options["turn"].as<std::vector<std::string>>()) {
    turns.push_back(tokenizer.encode(text, false));
    if (turns.back().empty())
      throw std::invalid_argument("--turn: the text has no tokens; give some text");
  }
  return turns;
}

}  // namespace kvlab
