// A tokenizer as Hugging Face's tokenizer.json describes it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvlab {

class Tokenizer {
 public:
  /// Byte-level BPE (GPT-2, Llama-3, Qwen2 split patterns) or SentencePiece-style BPE with byte
  /// fallback. Throws std::runtime_error that names the file and what is wrong or not supported.
  static Tokenizer load(const std::filesystem::path& tokenizer_json);
  /// That of a model of `model_ids` token ids. Throws std::runtime_error too where the file knows
  /// less than half of them: padding is never as much, so it is another model's.
  static Tokenizer load(const std::filesystem::path& tokenizer_json, std::size_t model_ids);

  /// Token ids of UTF-8 text, the first `most` of them. `add_special`: what the file's
  /// post-processor adds (BOS, say).
  /// Invalid UTF-8: each maximal invalid part is read as one U+FFFD, as Python's errors="replace"
  /// does. Throws std::runtime_error if the file's pattern needs too many steps on this text, or
  /// for an id that the model does not have.
  std::vector<std::int32_t> encode(
      std::string_view text, bool add_special = true,
      std::size_t most = std::numeric_limits<std::size_t>::max()) const;
  /// What the file's post-processor puts before a text: BOS, say, or nothing.
  const std::vector<std::int32_t>& before() const;
  /// Bytes of the ids, not always whole UTF-8 (a token may end within a character); `skip_special`
  /// leaves out special tokens. Ids that only the model has are no text; others that are unknown
  /// throw std::out_of_range.
  std::string decode(std::span<const std::int32_t> ids, bool skip_special = true) const;

  /// The id of a token as the file spells it.
  std::optional<std::int32_t> id_of(std::string_view token) const;
  /// One more than the largest id: what a model's embedding must have at least.
  std::size_t vocab_size() const;

 private:
  class Impl;
  std::shared_ptr<const Impl> impl_;
  std::string place_;
  std::size_t model_ids_ = 0;  ///< 0: whatever the file says
};

// Which of a text's tokens a part of it lies in.

/// Some of a text's tokens, one behind the other.
struct TokenRange {
  std::uint32_t start, tokens;
};

/// The fewest tokens that cover `text`, where it is once in what `ids` spell, less a special token
/// in front. Throws std::invalid_argument that quotes it where it is not, or more than once.
TokenRange covering_tokens(const Tokenizer& tokenizer, std::span<const std::int32_t> ids,
                           std::string_view text);

}  // namespace kvlab
