// A tokenizer that Hugging Face's tokenizer.json describes.
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
  /// Reads a byte-level BPE (split patterns of GPT-2, Llama 3, Qwen2) or a SentencePiece-style BPE
  /// with byte fallback. Throws std::runtime_error that names the file and what is wrong or not
  /// supported.
  static Tokenizer load(const std::filesystem::path& tokenizer_json);
  /// Reads the tokenizer of a model that has `model_ids` token ids. Also throws std::runtime_error
  /// if the file has fewer than half of these ids, because such a file belongs to another model. A
  /// model may be padded with unused ids, but never with more of them than it uses.
  static Tokenizer load(const std::filesystem::path& tokenizer_json, std::size_t model_ids);

  /// Encodes UTF-8 text and returns the first `max_ids` ids. With `add_special`, adds what the
  /// file's post-processor adds (for example BOS). Each maximal invalid part of the text is read as
  /// one U+FFFD, as Python's errors="replace" does. Throws std::runtime_error if the file's pattern
  /// needs too many steps on this text, or for an id that the model does not have.
  std::vector<std::int32_t> encode(
      std::string_view text, bool add_special = true,
      std::size_t max_ids = std::numeric_limits<std::size_t>::max()) const;
  /// The ids that the file's post-processor adds before a text, such as BOS; may be empty.
  const std::vector<std::int32_t>& before() const;
  /// Decodes ids to bytes. The bytes may end within a UTF-8 character, because tokens may. With
  /// `skip_special`, leaves out special tokens. Ids that the model has but the file does not
  /// produce no text. Throws std::out_of_range for other unknown ids.
  std::string decode(std::span<const std::int32_t> ids, bool skip_special = true) const;

  /// The id of a token in the file's spelling; nullopt if there is none.
  std::optional<std::int32_t> id_of(std::string_view token) const;
  /// The largest id plus one. A model's embedding must have at least this number of rows.
  std::size_t vocab_size() const;

 private:
  class Impl;
  std::shared_ptr<const Impl> impl_;
  std::string place_;
  std::size_t model_ids_ = 0;  ///< 0: the number of ids in the file
};

// Finds the tokens that contain a part of a text.

/// A range of a text's tokens.
struct TokenRange {
  std::uint32_t start, tokens;
};

/// The smallest range of tokens that covers `text`, which must occur exactly once in the text of
/// `ids`. A special token at the start is ignored. Throws std::invalid_argument that quotes `text`
/// if it does not occur or occurs more than once.
TokenRange covering_tokens(const Tokenizer& tokenizer, std::span<const std::int32_t> ids,
                           std::string_view text);

}  // namespace kvlab
