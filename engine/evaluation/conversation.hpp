// Turns of a conversation: a prompt is fed, an answer is sampled token by token.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/checkpoint/model.hpp"
#include "engine/decoder.hpp"
#include "engine/sampler.hpp"
#include "engine/sequence_decoder.hpp"
#include "engine/tokenizer/tokenizer.hpp"

namespace kvlab {
/// The first `most` token ids of a sequence's first text, with the special tokens that the
/// tokenizer adds; what it puts in front is not put there again where the text begins with it.
std::vector<std::int32_t> encode_prompt(const Tokenizer& tokenizer, std::string_view text,
                                        std::size_t most = std::numeric_limits<std::size_t>::max());

/// How many of `before` a text begins with itself.
std::size_t begun_with(std::span<const std::int32_t> text, std::span<const std::int32_t> before);

/// The most tokens that `turns` and their answers come to. Throws std::invalid_argument if that is
/// 2^31 or more: positions and budgets stay below.
std::uint32_t max_tokens(std::span<const std::vector<std::int32_t>> turns,
                         std::uint32_t max_new_tokens);

struct Answer {
  std::vector<std::int32_t> ids;  ///< sampled, an end-of-text token included
  std::string text;               ///< valid UTF-8
  bool ended = false;             ///< by an end-of-text token
};

/// Tokens fed and the time they took.
struct Pace {
  std::uint64_t tokens = 0;
  double seconds = 0;

  double tokens_per_second() const {
    return seconds > 0 ? static_cast<double>(tokens) / seconds : 0;
  }
};

class Conversation {
 public:
  /// All must outlive the conversation.
  Conversation(SequenceDecoder& decoder, const ModelConfig& config, const Tokenizer& tokenizer,
               SamplingOptions sampling);

  /// Feeds a prompt, behind the last token of the answer before it (which nothing followed, so it
  /// was not fed), and samples at most `max_new_tokens`. `on_text` gets the answer as it comes.
  Answer ask(std::span<const std::int32_t> prompt, std::uint32_t max_new_tokens,
             const std::function<void(const std::string&)>& on_text);

  const Pace& prompt_pace() const { return prompt_pace_; }
  const Pace& decode_pace() const { return decode_pace_; }

 private:
  void feed(std::span<const std::int32_t> ids, SegmentKind kind);

  SequenceDecoder& decoder_;
  const ModelConfig& config_;
  const Tokenizer& tokenizer_;
  Sampler sampler_;
  std::optional<std::int32_t> pending_;  // sampled, not yet fed
  Pace prompt_pace_, decode_pace_;
};

// How many positions a sequence needs, beside those that its model was trained on.

/// Positions that the model will meet in `length` tokens: of the whole sequence, or of the cache
/// where they are at cache positions.
std::uint32_t needed_positions(const ResolvedConfig& cache, std::uint32_t longest_prompt,
                               std::uint32_t length);

/// The cache that stays within what the model was trained on, whatever the length: advice for the
/// two below.
std::string cache_positions_advice(const ModelConfig& config);

/// Throws std::invalid_argument where prompts alone need more positions than the model was trained
/// on. The message says what would fit, and `advice`.
void refuse_beyond_context(const ModelConfig& config, std::uint32_t positions,
                           const std::string& advice = "");

/// What to warn of before decoding over so many positions; "": nothing.
std::string context_warning(const ModelConfig& config, std::uint32_t positions,
                            const std::string& advice = "");

// Text as its tokens come: whole UTF-8 characters only.

/// Takes from the front of `bytes` all that is settled, as valid UTF-8: bytes that cannot be part
/// of a character become U+FFFD; a character that may still be completed stays, unless `last`.
std::string take_utf8(std::string& bytes, bool last);

class TextStream {
 public:
  /// `context`: the ids before the first one, which may decide about its leading space.
  TextStream(const Tokenizer& tokenizer, std::span<const std::int32_t> context);

  /// The text that `id` completes; special tokens have none.
  std::string add(std::int32_t id);
  /// What is left, made valid.
  std::string finish() { return take_utf8(pending_, true); }

 private:
  void shorten(std::size_t length);

  const Tokenizer& tokenizer_;
  std::vector<std::int32_t> window_;  // the last ids
  std::size_t known_bytes_ = 0;       // of the window's text, those of ids added before
  std::string pending_;
};

}  // namespace kvlab
