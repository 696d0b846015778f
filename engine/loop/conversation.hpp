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
std::uint32_t most_tokens(std::span<const std::vector<std::int32_t>> turns,
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

}  // namespace kvlab
