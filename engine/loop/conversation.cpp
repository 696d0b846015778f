#include "engine/loop/conversation.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>

#include "engine/loop/text_stream.hpp"

namespace kvlab {
namespace {

void add(Pace& pace, std::size_t tokens, std::chrono::steady_clock::time_point start) {
  pace.tokens += tokens;
  pace.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

std::vector<std::int32_t> encode_prompt(const Tokenizer& tokenizer, std::string_view text,
                                        std::size_t most) {
  const std::vector<std::int32_t>& before = tokenizer.before();
  const std::size_t more = std::min(before.size(), std::numeric_limits<std::size_t>::max() - most);
  std::vector<std::int32_t> ids = tokenizer.encode(text, true, most + more);
  if (ids.size() > before.size()) {
    const auto own = ids.begin() + static_cast<std::ptrdiff_t>(before.size());
    ids.erase(own, own + static_cast<std::ptrdiff_t>(begun_with({own, ids.end()}, before)));
  }
  if (ids.size() > most) ids.resize(most);
  return ids;
}

std::size_t begun_with(std::span<const std::int32_t> text, std::span<const std::int32_t> before) {
  return static_cast<std::size_t>(std::ranges::mismatch(text, before).in1 - text.begin());
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
