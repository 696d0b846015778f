// Added tokens. They are matched literally in a text before it is split in any other way.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "engine/tokenizer/json.hpp"

namespace kvlab::tokenizer {

struct AddedToken {
  std::string content;
  std::int32_t id;
  bool special;      ///< left out when decoding skips special tokens
  bool single_word;  ///< does not match within a word
  bool lstrip;       ///< also takes the white space before it
  bool rstrip;       ///< also takes the white space after it
  bool normalized;   ///< matched in the normalized text; its content is normalized too
};

/// Reads the file's `added_tokens`, in order. Throws std::runtime_error if one of them is broken,
/// if an id has two contents, or if a content has two ids.
std::vector<AddedToken> read_added_tokens(const Node& file);

/// A part of a text: an added token, or the text between two added tokens.
struct Segment {
  std::size_t begin, end;  ///< range in bytes
  std::optional<std::int32_t> id;
};

/// Finds added tokens from left to right. At each position the longest match counts.
class AddedTokenMatcher {
 public:
  /// Adds a token. `spelling`: how the token is written in the text. If several tokens have the
  /// same spelling, the first one counts.
  void add(std::string_view spelling, const AddedToken& token);
  /// Passes the parts of `text` (valid UTF-8) to `sink`, in order. If `sink` returns false, returns
  /// false immediately.
  bool split(std::string_view text, const std::function<bool(const Segment&)>& sink) const;

 private:
  struct Match {
    std::size_t end;
    const AddedToken* token;
  };
  std::optional<Match> longest_at(std::string_view text, std::size_t at) const;

  // A trie of bytes with root node 0. A node stores the added token that ends there, if there is
  // one.
  std::vector<std::optional<AddedToken>> nodes_{std::nullopt};
  std::unordered_map<std::uint64_t, std::uint32_t> edges_;  // node << 8 | byte -> node
};

}  // namespace kvlab::tokenizer

// The special tokens that a file adds before and after a text.

namespace kvlab::tokenizer {

struct PostProcessor {
  std::vector<std::int32_t> before, after;  ///< ids before and after those of the text

  /// Reads the file's `post_processor`, which may be null or missing. Throws std::runtime_error
  /// unless it is TemplateProcessing, ByteLevel or a Sequence of them.
  static PostProcessor from_file(const Node& file);
};

}  // namespace kvlab::tokenizer
