// The regular expression of a tokenizer.json, run by PCRE2.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace kvlab::tokenizer {

/// Bytes [begin, end) of a text.
struct ByteRange {
  std::size_t begin, end;
};

/// Whoever takes the pieces of a text one by one, so that they need not all be held: false where no
/// more are wanted, which each cutter returns at once.
using PieceSink = std::function<bool(std::string_view piece)>;

/// The pattern in PCRE2's words. Files are written for Oniguruma; what the two read differently is
/// translated (white space, \u) or refused by name. Throws std::runtime_error.
std::string translate_pattern(std::string_view pattern);

/// How long the patterns of a tokenizer may take over one text: a second, and a hundred times what
/// patterns of real models need. Of the processor, so that a machine that is busy counts for
/// nothing.
class MatchTime {
 public:
  /// Begins now, for a text of so many bytes.
  explicit MatchTime(std::size_t bytes);
  /// Throws std::runtime_error if this thread has used it up.
  void check() const;

 private:
  using Seconds = std::chrono::duration<double>;
  static Seconds of_thread();

  std::size_t bytes_;
  Seconds max_, began_;
  std::chrono::steady_clock::time_point at_;
};

/// A compiled pattern; matching is const and may be done by many threads.
class Pattern {
 public:
  /// Throws std::runtime_error for a pattern that is too long, does not compile, is read
  /// differently by Oniguruma, or can match nothing.
  static Pattern regex(std::string_view pattern);
  /// Matches this very text. Throws std::runtime_error if it is empty.
  static Pattern literal(std::string_view text);

  /// Cuts valid UTF-8 at both ends of every match: matches and what lies between them, in order.
  /// Throws std::runtime_error if the pattern needs too many steps on this text, or `time` is up.
  bool cut(std::string_view text, const MatchTime& time,
           const std::function<bool(ByteRange range, bool is_match)>& sink) const;

 private:
  struct Code;
  explicit Pattern(std::shared_ptr<const Code> code) : code_(std::move(code)) {}
  std::shared_ptr<const Code> code_;
};

}  // namespace kvlab::tokenizer
