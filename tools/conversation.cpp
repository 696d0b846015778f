#include "tools/conversation.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>

#include "tools/options.hpp"
#include "tools/text_stream.hpp"

namespace kvlab {
namespace {

constexpr std::int64_t kMostTokens = 1 << 30;

}  // namespace

void add_turn_options(po::options_description& options) {
  auto add = options.add_options();
  add("max-new-tokens", po::value<std::int64_t>()->value_name("N")->default_value(100),
      "tokens to sample after each turn, at most");
  add("turn", po::value<std::vector<std::string>>()->composing()->value_name("TEXT"),
      "a further turn, fed after the answer and answered too; repeatable");
  add("temperature", po::value<double>()->value_name("T")->default_value(0, "0"),
      "0: the most likely token always");
  add("top-k", po::value<std::int64_t>()->value_name("K")->default_value(0),
      "draw from the K most likely tokens; 0: from all");
  add("top-p", po::value<double>()->value_name("P")->default_value(1, "1"),
      "draw from the fewest tokens that together reach this probability");
}

SamplingOptions sampling_from(const po::variables_map& options) {
  const SamplingOptions sampling{
      .temperature = options["temperature"].as<double>(),
      .top_k = static_cast<std::uint32_t>(number_from(options, "top-k", 0, kMostTokens)),
      .top_p = options["top-p"].as<double>(),
      .seed = seed_from(options)};
  Sampler{sampling};  // refuses what is out of range, before a model is loaded
  return sampling;
}

std::uint32_t max_new_tokens_from(const po::variables_map& options) {
  return static_cast<std::uint32_t>(number_from(options, "max-new-tokens", 0, kMostTokens));
}

std::vector<std::vector<std::int32_t>> turns_from(const po::variables_map& options,
                                                  const Tokenizer& tokenizer,
                                                  std::vector<std::int32_t> first) {
  if (first.empty()) throw std::invalid_argument("--prompt: has no tokens; give some text");
  std::vector<std::vector<std::int32_t>> turns{std::move(first)};
  if (!options.count("turn")) return turns;
  for (const std::string& text : options["turn"].as<std::vector<std::string>>()) {
    turns.push_back(tokenizer.encode(text, false));
    if (turns.back().empty()) throw std::invalid_argument("--turn: has no tokens; give some text");
  }
  return turns;
}

Conversation::Conversation(Decoder& decoder, const ModelConfig& config, const Tokenizer& tokenizer,
                           SamplingOptions sampling)
    : decoder_(decoder), config_(config), tokenizer_(tokenizer), sampler_(sampling) {}

Answer Conversation::ask(std::span<const std::int32_t> prompt, std::uint32_t max_new_tokens,
                         const std::function<void(const std::string&)>& on_text) {
  if (pending_) feed({&*pending_, 1}, SegmentKind::decode);
  pending_.reset();
  std::span<const float> logits = feed(prompt, SegmentKind::prompt);

  Answer answer;
  TextStream stream(tokenizer_, prompt);
  const auto emit = [&](const std::string& text) {
    answer.text += text;
    if (!text.empty()) on_text(text);
  };
  while (answer.ids.size() < max_new_tokens && !answer.ended) {
    if (pending_) logits = feed({&*pending_, 1}, SegmentKind::decode);
    pending_ = sampler_.pick(logits);
    answer.ids.push_back(*pending_);
    answer.ended = std::count(config_.eos.begin(), config_.eos.end(), *pending_) > 0;
    emit(stream.add(*pending_));
  }
  emit(stream.finish());
  return answer;
}

std::span<const float> Conversation::feed(std::span<const std::int32_t> ids, SegmentKind kind) {
  const auto start = std::chrono::steady_clock::now();
  const auto logits = decoder_.feed(ids, kind);
  Pace& pace = kind == SegmentKind::prompt ? prompt_pace_ : decode_pace_;
  pace.tokens += ids.size();
  pace.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return logits;
}

}  // namespace kvlab
