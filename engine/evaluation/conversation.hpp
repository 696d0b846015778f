// A conversation in turns: it feeds a prompt and samples an answer token by token.
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
/// Encodes the first text of a sequence, with the special tokens that the tokenizer adds, and
/// returns the first `max_ids` ids. If the text already begins with some of these special tokens,
/// they are not added again.
std::vector<std::int32_t> encode_prompt(
    const Tokenizer& tokenizer, std::string_view text,
    std::size_t max_ids = std::numeric_limits<std::size_t>::max());

/// The number of leading ids that `text` and `before` have in common.
std::size_t common_prefix_length(std::span<const std::int32_t> text,
                                 std::span<const std::int32_t> before);

/// Maximum number of tokens that `turns` and their answers may have. Throws std::invalid_argument
/// if it is 2^31 or more, because positions and budgets have to be smaller.
std::uint32_t max_tokens(std::span<const std::vector<std::int32_t>> turns,
                         std::uint32_t max_new_tokens);

struct Answer {
  std::vector<std::int32_t> ids;  ///< sampled ids, the end-of-text token included
  std::string text;               ///< valid UTF-8
  bool ended = false;             ///< whether an end-of-text token ended the answer
};

/// Number of tokens and the time that they took.
struct Pace {
  std::uint64_t tokens = 0;
  double seconds = 0;

  double tokens_per_second() const {
    return seconds > 0 ? static_cast<double>(tokens) / seconds : 0;
  }
};

class Conversation {
 public:
  /// All arguments must outlive the conversation.
  Conversation(SequenceDecoder& decoder, const ModelConfig& config, const Tokenizer& tokenizer,
               SamplingOptions sampling);

  /// Feeds the last token of the previous answer, which was sampled but not fed, and then the
  /// prompt. Then samples at most `max_new_tokens` tokens. `on_text` is called with the answer
  /// piece by piece.
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

// Compares the positions that a sequence needs with the context that its model was trained on.

/// The number of positions that the model has to handle in a sequence of `length` tokens. It is
/// `length` or, with cache positions, the maximum number of tokens that the cache holds at once.
std::uint32_t needed_positions(const ResolvedConfig& cache, std::uint32_t longest_prompt,
                               std::uint32_t length);

/// Advice for the two functions below: cache settings with which a sequence of any length stays
/// within the context that the model was trained on.
std::string cache_positions_advice(const ModelConfig& config);

/// Throws std::invalid_argument if the prompts alone need more positions than the model was trained
/// for. The message says what would fit, and contains `advice`.
void refuse_beyond_context(const ModelConfig& config, std::uint32_t positions,
                           const std::string& advice = "");

/// A warning for decoding over `positions` positions; empty if they are within the trained context.
std::string context_warning(const ModelConfig& config, std::uint32_t positions,
                            const std::string& advice = "");

// Streams text while its tokens arrive, in whole UTF-8 characters.

/// Removes all complete characters from the front of `bytes`, and returns them as valid UTF-8.
/// Bytes that cannot be part of a character become U+FFFD. If the last character is incomplete, its
/// bytes stay in `bytes`, unless `last` is true.
std::string take_utf8(std::string& bytes, bool last);

class TextStream {
 public:
  /// `context`: the ids that precede the first added id. They may decide whether the text starts
  /// with a space.
  TextStream(const Tokenizer& tokenizer, std::span<const std::int32_t> context);

  /// Adds an id and returns the text that it completes. Special tokens have no text.
  std::string add(std::int32_t id);
  /// Returns the rest of the text as valid UTF-8.
  std::string finish() { return take_utf8(pending_, true); }

 private:
  void shorten(std::size_t length);

  const Tokenizer& tokenizer_;
  std::vector<std::int32_t> window_;  // the latest ids
  std::size_t known_bytes_ = 0;       // bytes of the window's text that were returned before
  std::string pending_;
};

}  // namespace kvlab
