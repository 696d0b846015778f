// The regular expression of a tokenizer.json, run by PCRE2.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace kvlab::tokenizer {

/// Bytes [begin, end) of a text.
struct ByteRange {
  std::size_t begin, end;
};

/// The pattern in PCRE2's words. Files are written for Oniguruma; what the two read differently is
/// translated (white space, \u) or refused by name. Throws std::runtime_error.
std::string translate_pattern(std::string_view pattern);

/// A compiled pattern; matching is const and may be done by many threads.
class Pattern {
 public:
  /// Throws std::runtime_error for a pattern that is too long, does not compile, is read
  /// differently by Oniguruma, or can match nothing.
  static Pattern regex(std::string_view pattern);
  /// Matches this very text. Throws std::runtime_error if it is empty.
  static Pattern literal(std::string_view text);

  /// Cuts valid UTF-8 at both ends of every match: matches and what lies between them, in order.
  /// Throws std::runtime_error if the pattern needs too many steps on this text.
  std::vector<ByteRange> isolate(std::string_view text) const;

 private:
  struct Code;
  explicit Pattern(std::shared_ptr<const Code> code) : code_(std::move(code)) {}
  std::shared_ptr<const Code> code_;
};

}  // namespace kvlab::tokenizer
