// Oniguruma's regular expressions in PCRE2's words: only what both read alike is let through.
#include <fmt/format.h>

#include <array>
#include <stdexcept>

#include "engine/tokenizer/pattern.hpp"

namespace kvlab::tokenizer {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
bool is_hex(char c) { return is_digit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'); }

class Translator {
 public:
  explicit Translator(std::string_view pattern) : rest_(pattern), size_(pattern.size()) {}

  std::string run() {
    while (!rest_.empty()) {
      switch (rest_.front()) {
        case '\\':
          escape();
          break;
        case '[':
          character_class();
          break;
        case '(':
          group();
          break;
        case '{':
          repeat();
          break;
        case '^':
        case '$':
          refuse("an anchor");
        default:
          copy(1);
      }
    }
    return std::move(out_);
  }

 private:
  [[noreturn]] void refuse(std::string_view what) const {
    throw std::runtime_error(fmt::format("the pattern has {} at offset {}, which is not supported",
                                         what, size_ - rest_.size()));
  }

  void copy(std::size_t bytes) {
    out_ += rest_.substr(0, bytes);
    rest_.remove_prefix(bytes);
  }

  void replace(std::size_t bytes, std::string_view with) {
    out_ += with;
    rest_.remove_prefix(bytes);
  }

  void escape() {
    if (rest_.size() < 2) refuse("an unfinished escape");
    switch (const char c = rest_[1]; c) {
      // PCRE2's own \s has U+180E, which is no white space any more.
      case 's':
        return replace(2, "\\p{White_Space}");
      case 'S':
        return replace(2, "\\P{White_Space}");
      case 'd':
      case 'D':
      case 'r':
      case 'n':
      case 't':
      case 'f':
        return copy(2);
      case 'p':
      case 'P':
        return property();
      case 'u':
        return code_point();
      default:
        if (is_letter(c) || is_digit(c)) refuse(fmt::format("the escape \\{}", c));
        copy(2);
    }
  }

  // A general category, such as \p{L} or \p{Lu}; scripts and their kind are read differently.
  void property() {
    const std::size_t close = rest_.find('}');
    const bool one = close == 4, two = close == 5;
    if (!(one || two) || rest_[2] != '{' ||
        std::string_view("CLMNPSZ").find(rest_[3]) == rest_.npos ||
        (two && !(rest_[4] >= 'a' && rest_[4] <= 'z'))) {
      refuse("a property that is not a general category such as \\p{L} or \\p{Lu}");
    }
    copy(close + 1);
  }

  void code_point() {
    constexpr std::size_t kDigits = 4;
    const std::string_view hex = rest_.substr(2, kDigits);
    if (hex.size() < kDigits) refuse("an unfinished \\u");
    for (const char c : hex) {
      if (!is_hex(c)) refuse("a \\u without four hexadecimal digits");
    }
    const auto text = fmt::format("\\x{{{}}}", hex);
    replace(2 + kDigits, text);
  }

  // Oniguruma nests classes and intersects them with &&.
  void character_class() {
    copy(1);
    if (rest_.starts_with('^')) copy(1);
    if (rest_.starts_with(']')) refuse("a class that begins with ]");
    while (!rest_.empty() && rest_.front() != ']') {
      if (rest_.front() == '[') refuse("a class within a class");
      if (rest_.starts_with("&&")) refuse("an intersection of classes");
      rest_.front() == '\\' ? escape() : copy(1);
    }
    if (rest_.empty()) refuse("an unfinished class");
    copy(1);
  }

  void group() {
    constexpr std::array<std::string_view, 7> kKnown = {"(?:",  "(?i:", "(?=", "(?!",
                                                        "(?<=", "(?<!", "(?>"};
    for (const std::string_view start : kKnown) {
      if (rest_.starts_with(start)) return copy(start.size());
    }
    if (rest_.starts_with("(?") || rest_.starts_with("(*")) {
      refuse(fmt::format("a group that begins with {}", rest_.substr(0, 2)));
    }
    copy(1);
  }

  // {n}, {n,} or {n,m}; what follows + or ? means differs.
  void repeat() {
    const std::size_t close = rest_.find('}');
    if (close == rest_.npos || close < 2 || !is_digit(rest_[1])) refuse("a bare {");
    for (const char c : rest_.substr(1, close - 1)) {
      if (!is_digit(c) && c != ',') refuse("a bare {");
    }
    copy(close + 1);
    if (rest_.starts_with('+') || rest_.starts_with('?')) refuse("a quantifier after }");
  }

  std::string_view rest_;
  std::size_t size_;
  std::string out_;
};

}  // namespace

std::string translate_pattern(std::string_view pattern) { return Translator(pattern).run(); }

}  // namespace kvlab::tokenizer
