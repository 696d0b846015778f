// Added tokens: found in a text as they are written, before anything else cuts it.
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
  bool single_word;  ///< not within a word
  bool lstrip;       ///< takes the white space before it along
  bool rstrip;       ///< takes the white space after it along
  bool normalized;   ///< looked for in the normalised text, as its own content normalises
};

/// The file's `added_tokens`, in order. Throws std::runtime_error for a broken one, and where one
/// id has two contents or one content two ids.
std::vector<AddedToken> read_added_tokens(const Node& file);

/// A stretch of text: an added token, or what lies between two.
struct Segment {
  std::size_t begin, end;  ///< bytes
  std::optional<std::int32_t> id;
};

/// Finds tokens left to right, the longest first.
class AddedTokenMatcher {
 public:
  /// `spelling` is what the token looks like in the text. The first token with a spelling keeps it.
  void add(std::string_view spelling, const AddedToken& token);
  /// The whole of `text` (valid UTF-8) in order, until `sink` wants no more: false then.
  bool split(std::string_view text, const std::function<bool(const Segment&)>& sink) const;

 private:
  struct Match {
    std::size_t end;
    const AddedToken* token;
  };
  std::optional<Match> longest_at(std::string_view text, std::size_t at) const;

  // A trie of bytes; node 0 is its root. A node holds the token that ends there, if any.
  std::vector<std::optional<AddedToken>> nodes_{std::nullopt};
  std::unordered_map<std::uint64_t, std::uint32_t> edges_;  // node << 8 | byte -> node
};

}  // namespace kvlab::tokenizer

// The special tokens that a file puts around a text.

namespace kvlab::tokenizer {

struct PostProcessor {
  std::vector<std::int32_t> before, after;  ///< ids around those of the text

  /// The file's `post_processor`, null or missing included. Throws std::runtime_error for one that
  /// is not TemplateProcessing, ByteLevel or a Sequence of them.
  static PostProcessor from_file(const Node& file);
};

}  // namespace kvlab::tokenizer
