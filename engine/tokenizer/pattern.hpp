// The regular expressions of a tokenizer.json, executed by PCRE2.
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

/// Receives the pieces of a text one by one, so that they need not all be stored. If it returns
/// false, the function that splits the text returns false immediately.
using PieceSink = std::function<bool(std::string_view piece)>;

/// Translates a pattern, which is written for Oniguruma, to PCRE2's syntax. Where the two libraries
/// differ, the pattern is either translated (white space, \u) or refused with a message that names
/// the construct. Throws std::runtime_error if it refuses the pattern.
std::string translate_pattern(std::string_view pattern);

/// The time limit for a tokenizer's patterns on one text: 1 s plus 10 µs per byte, which is a
/// hundred times what patterns of real models need. The limit is in CPU time, which does not depend
/// on how busy the machine is.
class MatchTime {
 public:
  /// Starts the clock for a text of `bytes` bytes.
  explicit MatchTime(std::size_t bytes);
  /// Throws std::runtime_error if this thread has used up its time.
  void check() const;

 private:
  using Seconds = std::chrono::duration<double>;
  static Seconds measure_thread_time();

  std::size_t bytes_;
  Seconds max_, began_;
  std::chrono::steady_clock::time_point at_;
};

/// A compiled pattern. Several threads may use it at the same time.
class Pattern {
 public:
  /// Compiles a regular expression. Throws std::runtime_error if it is too long, does not compile,
  /// is interpreted differently by Oniguruma, or can match the empty text.
  static Pattern regex(std::string_view pattern);
  /// Matches `text` literally. Throws std::runtime_error if it is empty.
  static Pattern literal(std::string_view text);

  /// Splits valid UTF-8 at both ends of every match, and passes the matches and the text between
  /// them to `sink`, in order. If `sink` returns false, returns false immediately. Throws
  /// std::runtime_error if the pattern needs too many steps on this text, or if `time` has run out.
  bool cut(std::string_view text, const MatchTime& time,
           const std::function<bool(ByteRange range, bool is_match)>& sink) const;

 private:
  struct Code;
  explicit Pattern(std::shared_ptr<const Code> code) : code_(std::move(code)) {}
  std::shared_ptr<const Code> code_;
};

}  // namespace kvlab::tokenizer
