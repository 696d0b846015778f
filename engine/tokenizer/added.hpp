// Added tokens, which are matched in a text literally before anything else splits it.
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
  bool normalized;   ///< matched in the normalised text, with its own content normalised
};

/// Reads the file's `added_tokens`, in order. Throws std::runtime_error for a broken one, or if an
/// id has two contents or a content two ids.
std::vector<AddedToken> read_added_tokens(const Node& file);

/// A part of a text: an added token, or the text between two.
struct Segment {
  std::size_t begin, end;  ///< bytes
  std::optional<std::int32_t> id;
};

/// Finds added tokens from left to right, the longest match first.
class AddedTokenMatcher {
 public:
  /// Adds a token. `spelling`: how it is written in the text. The first token with a spelling keeps
  /// it.
  void add(std::string_view spelling, const AddedToken& token);
  /// Passes the parts of `text` (valid UTF-8) to `sink`, in order. Returns false as soon as `sink`
  /// does.
  bool split(std::string_view text, const std::function<bool(const Segment&)>& sink) const;

 private:
  struct Match {
    std::size_t end;
    const AddedToken* token;
  };
  std::optional<Match> longest_at(std::string_view text, std::size_t at) const;

  // A trie of bytes with root node 0. A node has the token that ends there, if any.
  std::vector<std::optional<AddedToken>> nodes_{std::nullopt};
  std::unordered_map<std::uint64_t, std::uint32_t> edges_;  // node << 8 | byte -> node
};

}  // namespace kvlab::tokenizer

// The special tokens that a file puts around a text.

namespace kvlab::tokenizer {

struct PostProcessor {
  std::vector<std::int32_t> before, after;  ///< ids before and after those of the text

  /// Reads the file's `post_processor`, which may be null or missing. Throws std::runtime_error for
  /// one that is not TemplateProcessing, ByteLevel or a Sequence of them.
  static PostProcessor from_file(const Node& file);
};

}  // namespace kvlab::tokenizer
