#include "tools/prompt.hpp"

#include <stdexcept>

#include "traces/base/safetensors.hpp"

namespace kvlab {
namespace {

constexpr std::size_t kMaxPromptBytes = std::size_t{1} << 30;

}  // namespace

void add_prompt_options(po::options_description& options) {
  auto add = options.add_options();
  add("prompt", po::value<std::string>()->value_name("TEXT"), "the prompt");
  add("prompt-file", po::value<std::string>()->value_name("FILE"), "a file that holds the prompt");
}

std::string prompt_from(const po::variables_map& options) {
  const bool text = options.count("prompt") > 0, file = options.count("prompt-file") > 0;
  if (text == file)
    throw std::invalid_argument(
        text ? "--prompt and --prompt-file: give one of them, not both"
             : "--prompt: missing; give --prompt TEXT or --prompt-file FILE");
  if (text) return options["prompt"].as<std::string>();
  return read_text_file(options["prompt-file"].as<std::string>(), kMaxPromptBytes);
}

std::vector<std::int32_t> encode_prompt(const Tokenizer& tokenizer, const ModelConfig& config,
                                        std::string_view text) {
  std::vector<std::int32_t> ids = tokenizer.encode(text);
  const bool wants_bos = config.bos >= 0 && !config.architecture.starts_with("Qwen");
  if (wants_bos && (ids.empty() || ids.front() != config.bos)) ids.insert(ids.begin(), config.bos);
  return ids;
}

}  // namespace kvlab
