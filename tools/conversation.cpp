#include "tools/conversation.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>

#include "tools/options.hpp"
#include "engine/loop/text_stream.hpp"

namespace kvlab {
namespace {

constexpr std::int64_t kMostTokens = 1 << 30;

void add(Pace& pace, std::size_t tokens, std::chrono::steady_clock::time_point start) {
  pace.tokens += tokens;
  pace.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

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

std::uint32_t most_tokens(std::span<const std::vector<std::int32_t>> turns,
                          std::uint32_t max_new_tokens) {
  std::size_t tokens = 0;
  for (const auto& turn : turns) tokens += turn.size() + max_new_tokens;
  if (tokens >= std::size_t{1} << 31)
    throw std::invalid_argument(
        fmt::format("--max-new-tokens: {} makes a sequence of up to {} tokens with all turns; it "
                    "should stay below 2^31",
                    max_new_tokens, tokens));
  return static_cast<std::uint32_t>(tokens);
}

Conversation::Conversation(SequenceDecoder& decoder, const ModelConfig& config,
                           const Tokenizer& tokenizer, SamplingOptions sampling)
    : decoder_(decoder), config_(config), tokenizer_(tokenizer), sampler_(sampling) {}

Answer Conversation::ask(std::span<const std::int32_t> prompt, std::uint32_t max_new_tokens,
                         const std::function<void(const std::string&)>& on_text) {
  if (pending_) feed({&*pending_, 1}, SegmentKind::decode);
  pending_.reset();
  feed(prompt, SegmentKind::prompt);

  Answer answer;
  TextStream stream(tokenizer_, prompt);
  const auto emit = [&](const std::string& text) {
    answer.text += text;
    if (!text.empty()) on_text(text);
  };
  const auto start = std::chrono::steady_clock::now();
  decoder_.extend(sampler_, max_new_tokens, [&](std::int32_t id) {
    pending_ = id;
    answer.ids.push_back(id);
    answer.ended = std::count(config_.eos.begin(), config_.eos.end(), id) > 0;
    emit(stream.add(id));
    return !answer.ended;
  });
  if (!answer.ids.empty()) add(decode_pace_, answer.ids.size() - 1, start);
  emit(stream.finish());
  return answer;
}

void Conversation::feed(std::span<const std::int32_t> ids, SegmentKind kind) {
  const auto start = std::chrono::steady_clock::now();
  decoder_.feed(ids, kind);
  add(kind == SegmentKind::prompt ? prompt_pace_ : decode_pace_, ids.size(), start);
}

}  // namespace kvlab
