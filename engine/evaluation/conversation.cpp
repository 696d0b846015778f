#include "engine/evaluation/conversation.hpp"

#include <fmt/format.h>
#include <utf8proc.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>

namespace kvlab {
namespace {

void add(Pace& pace, std::size_t tokens, std::chrono::steady_clock::time_point start) {
  pace.tokens += tokens;
  pace.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

std::vector<std::int32_t> encode_prompt(const Tokenizer& tokenizer, std::string_view text,
                                        std::size_t max_ids) {
  const std::vector<std::int32_t>& before = tokenizer.before();
  const std::size_t more =
      std::min(before.size(), std::numeric_limits<std::size_t>::max() - max_ids);
  std::vector<std::int32_t> ids = tokenizer.encode(text, true, max_ids + more);
  if (ids.size() > before.size()) {
    const auto own = ids.begin() + static_cast<std::ptrdiff_t>(before.size());
    ids.erase(own,
              own + static_cast<std::ptrdiff_t>(common_prefix_length({own, ids.end()}, before)));
  }
  if (ids.size() > max_ids) ids.resize(max_ids);
  return ids;
}

std::size_t common_prefix_length(std::span<const std::int32_t> text,
                                 std::span<const std::int32_t> before) {
  return static_cast<std::size_t>(std::ranges::mismatch(text, before).in1 - text.begin());
}

std::uint32_t max_tokens(std::span<const std::vector<std::int32_t>> turns,
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

std::uint32_t needed_positions(const ResolvedConfig& cache, std::uint32_t longest_prompt,
                               std::uint32_t length) {
  const Modifiers& modifiers = cache.policy.modifiers;
  if (cache.positions == Positions::original || !cache.evicts() || modifiers.once ||
      cache.shares_slots() || cache.budget.exempts())
    return length;
  const std::uint32_t append =
      cache.prefill.chunk == 0 ? longest_prompt : std::min(longest_prompt, cache.prefill.chunk);
  return static_cast<std::uint32_t>(
      std::min<std::uint64_t>(length, modifiers.capacity(cache.budget_tokens, append)));
}

std::string cache_positions_advice(const ModelConfig& config) {
  return fmt::format(
      "; with --policy sink --budget {} --prefill stream, positions stay within that number",
      config.trained_context / 2);
}

void refuse_beyond_context(const ModelConfig& config, std::uint32_t positions,
                           const std::string& advice) {
  if (positions <= config.trained_context) return;
  throw std::invalid_argument(fmt::format(
      "--prompt: needs {} positions, but {} was trained with a context of only {} tokens; "
      "give a prompt of at most that length, or --beyond-context{}",
      positions, config.name, config.trained_context, advice));
}

std::string context_warning(const ModelConfig& config, std::uint32_t positions,
                            const std::string& advice) {
  if (positions <= config.trained_context) return "";
  return fmt::format(
      "the text may degrade, because it needs up to {} positions and the model was trained with "
      "only "
      "{}{}",
      positions, config.trained_context, advice);
}

namespace {

constexpr std::size_t kContext = 8, kLongestWindow = 32;  // ids

/// Whether `bytes` (fewer than four) may be the beginning of a character.
bool may_continue(std::string_view bytes) {
  std::string whole(bytes);
  for (const char first : {'\x80', '\x90', '\xa0', '\xbf'}) {
    whole.resize(bytes.size());
    whole.push_back(first);
    while (whole.size() <= 4) {
      std::int32_t code = 0;
      const auto* data = reinterpret_cast<const utf8proc_uint8_t*>(whole.data());
      const auto size = static_cast<utf8proc_ssize_t>(whole.size());
      if (utf8proc_iterate(data, size, &code) == size) return true;
      whole.push_back('\x80');
    }
  }
  return false;
}

}  // namespace

std::string take_utf8(std::string& bytes, bool last) {
  std::string text;
  std::size_t at = 0;
  while (at < bytes.size()) {
    std::int32_t code = 0;
    const auto size = utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(bytes.data()) + at,
                                       static_cast<utf8proc_ssize_t>(bytes.size() - at), &code);
    if (size > 0) {
      text.append(bytes, at, static_cast<std::size_t>(size));
      at += static_cast<std::size_t>(size);
    } else if (!last && bytes.size() - at < 4 && may_continue(std::string_view(bytes).substr(at))) {
      break;
    } else {
      text += "\xef\xbf\xbd";
      ++at;
    }
  }
  bytes.erase(0, at);
  return text;
}

TextStream::TextStream(const Tokenizer& tokenizer, std::span<const std::int32_t> context)
    : tokenizer_(tokenizer), window_(context.begin(), context.end()) {
  shorten(kContext);
}

std::string TextStream::add(std::int32_t id) {
  window_.push_back(id);
  const std::string text = tokenizer_.decode(window_);
  pending_ += text.substr(std::min(known_bytes_, text.size()));
  known_bytes_ = text.size();
  if (window_.size() > kLongestWindow) shorten(kContext);
  return take_utf8(pending_, false);
}

/// Keeps only the last `length` ids. If the window grew with the text, the whole text would be
/// decoded for each token, which takes quadratic time.
void TextStream::shorten(std::size_t length) {
  if (window_.size() > length)
    window_.erase(window_.begin(), window_.end() - static_cast<std::ptrdiff_t>(length));
  known_bytes_ = tokenizer_.decode(window_).size();
}

}  // namespace kvlab
