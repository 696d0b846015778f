#define PCRE2_CODE_UNIT_WIDTH 8
#include "engine/tokenizer/pattern.hpp"

#include <fmt/format.h>
#include <pcre2.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <stdexcept>

namespace kvlab::tokenizer {
namespace {

constexpr std::size_t kMaxPatternBytes = 16 * 1024;
constexpr std::uint32_t kMaxSteps = 10'000'000;  // maximum steps of one attempt to match
// Number of start positions that the first call of pcre2_match() tries, and maximum for later
// calls.
constexpr std::size_t kPlaces = 16, kMaxPlaces = 4096;
constexpr double kSeconds = 1, kSecondsPerByte = 1e-5;
constexpr std::size_t kJitStackStart = 32 * 1024;      // bytes
constexpr std::size_t kJitStackMax = 8 * 1024 * 1024;  // bytes
constexpr std::uint32_t kMaxHeap = 256 * 1024;         // in KiB, used without JIT

struct FreeCode {
  void operator()(pcre2_code* code) const { pcre2_code_free(code); }
};
struct FreeMatchData {
  void operator()(pcre2_match_data* data) const { pcre2_match_data_free(data); }
};
struct FreeMatchContext {
  void operator()(pcre2_match_context* context) const { pcre2_match_context_free(context); }
};
struct FreeJitStack {
  void operator()(pcre2_jit_stack* stack) const { pcre2_jit_stack_free(stack); }
};
struct FreeCompileContext {
  void operator()(pcre2_compile_context* context) const { pcre2_compile_context_free(context); }
};

template <class T>
T* require_allocated(T* made) {
  if (made == nullptr) throw std::bad_alloc();
  return made;
}

std::string message_of(int error) {
  std::array<PCRE2_UCHAR, 256> text{};
  pcre2_get_error_message(error, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

PCRE2_SPTR units(std::string_view text) { return reinterpret_cast<PCRE2_SPTR>(text.data()); }

std::unique_ptr<pcre2_code, FreeCode> compile(std::string_view pattern, std::uint32_t options) {
  const std::unique_ptr<pcre2_compile_context, FreeCompileContext> context(
      require_allocated(pcre2_compile_context_create(nullptr)));
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE at = 0;
  std::unique_ptr<pcre2_code, FreeCode> code(
      pcre2_compile(units(pattern), pattern.size(), options | PCRE2_UTF | PCRE2_USE_OFFSET_LIMIT,
                    &error, &at, context.get()));
  if (!code) {
    throw std::runtime_error(
        fmt::format("the pattern does not compile: {} at offset {}", message_of(error), at));
  }
  // Without JIT, the interpreter finds the same matches, but more slowly.
  pcre2_jit_compile(code.get(), PCRE2_JIT_COMPLETE);
  return code;
}

// The state of one scan of a text.
class Matcher {
 public:
  explicit Matcher(const pcre2_code& code)
      : code_(code),
        data_(require_allocated(pcre2_match_data_create_from_pattern(&code, nullptr))),
        context_(require_allocated(pcre2_match_context_create(nullptr))),
        stack_(pcre2_jit_stack_create(kJitStackStart, kJitStackMax, nullptr)) {
    pcre2_set_match_limit(context_.get(), kMaxSteps);
    pcre2_set_heap_limit(context_.get(), kMaxHeap);
    pcre2_jit_stack_assign(context_.get(), nullptr, stack_.get());
  }

  // Finds the first match at or after `from`. Returns false if there is none. Each call tries only
  // some start positions, because a call cannot be interrupted.
  bool find(std::string_view text, std::size_t from, const MatchTime& time, ByteRange& match) {
    for (std::size_t places = kPlaces; from < text.size();
         places = std::min(2 * places, kMaxPlaces)) {
      time.check();
      const std::size_t next = start_of_char(text, std::min(from + places, text.size()));
      pcre2_set_offset_limit(context_.get(), next - 1);
      if (find_from(text, from, match)) return true;
      from = next;
    }
    return false;
  }

 private:
  // The start of the next character at or after `at`.
  static std::size_t start_of_char(std::string_view text, std::size_t at) {
    while (at < text.size() && (static_cast<unsigned char>(text[at]) & 0xc0) == 0x80) ++at;
    return at;
  }

  bool find_from(std::string_view text, std::size_t from, ByteRange& match) {
    const int found = pcre2_match(&code_, units(text), text.size(), from, PCRE2_NO_UTF_CHECK,
                                  data_.get(), context_.get());
    if (found == PCRE2_ERROR_NOMATCH) return false;
    if (found < 0) {
      throw std::runtime_error(
          fmt::format("the tokenizer's pattern cannot split this text: {}", message_of(found)));
    }
    const PCRE2_SIZE* ends = pcre2_get_ovector_pointer(data_.get());
    match = {ends[0], ends[1]};
    return true;
  }

  const pcre2_code& code_;
  std::unique_ptr<pcre2_match_data, FreeMatchData> data_;
  std::unique_ptr<pcre2_match_context, FreeMatchContext> context_;
  std::unique_ptr<pcre2_jit_stack, FreeJitStack> stack_;
};

// Translates Oniguruma's regular expressions to PCRE2's. Accepts only expressions that both
// libraries interpret in the same way.

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
      // PCRE2's \s matches U+180E, which is no longer white space in Unicode.
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

  // A general category, such as \p{L} or \p{Lu}. Scripts and other properties are refused, because
  // the two libraries interpret them differently.
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

  // Copies a character class. Nested classes and intersections with &&, which Oniguruma allows, are
  // refused.
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

  // {n}, {n,} or {n,m}. A following + or ? has a different meaning in the two libraries.
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

struct Pattern::Code {
  std::unique_ptr<pcre2_code, FreeCode> compiled;
};

Pattern Pattern::regex(std::string_view pattern) {
  if (pattern.size() > kMaxPatternBytes) {
    throw std::runtime_error(fmt::format("the pattern has {} bytes; at most {} are allowed",
                                         pattern.size(), kMaxPatternBytes));
  }
  auto code = compile(translate_pattern(pattern), PCRE2_UCP);
  std::uint32_t matches_nothing = 0;
  pcre2_pattern_info(code.get(), PCRE2_INFO_MATCHEMPTY, &matches_nothing);
  if (matches_nothing != 0) {
    throw std::runtime_error("the pattern can match nothing; each match must have a character");
  }
  return Pattern(std::make_shared<const Code>(Code{std::move(code)}));
}

Pattern Pattern::literal(std::string_view text) {
  if (text.empty() || text.size() > kMaxPatternBytes) {
    throw std::runtime_error(fmt::format("the pattern must have 1 to {} bytes", kMaxPatternBytes));
  }
  return Pattern(std::make_shared<const Code>(Code{compile(text, PCRE2_LITERAL)}));
}

MatchTime::MatchTime(std::size_t bytes)
    : bytes_(bytes),
      max_(kSeconds + kSecondsPerByte * static_cast<double>(bytes)),
      began_(measure_thread_time()),
      at_(std::chrono::steady_clock::now()) {}

MatchTime::Seconds MatchTime::measure_thread_time() {
  timespec used{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
  return std::chrono::seconds(used.tv_sec) + std::chrono::nanoseconds(used.tv_nsec);
}

// Checks the wall clock first. It is faster to read, and never shows less than the thread's CPU
// time.
void MatchTime::check() const {
  if (std::chrono::steady_clock::now() - at_ < max_ || measure_thread_time() - began_ < max_)
    return;
  throw std::runtime_error(fmt::format(
      "the tokenizer's pattern cannot split this text: it takes more than {:.1f} s for {} bytes",
      max_.count(), bytes_));
}

bool Pattern::cut(std::string_view text, const MatchTime& time,
                  const std::function<bool(ByteRange range, bool is_match)>& sink) const {
  Matcher matcher(*code_->compiled);
  std::size_t done = 0;
  for (ByteRange match{}; done < text.size() && matcher.find(text, done, time, match);
       done = match.end) {
    // A look-behind could still cause an empty match. The rest of the text is then one piece.
    if (match.end <= done || match.begin == match.end) break;
    if (match.begin > done && !sink({done, match.begin}, false)) return false;
    if (!sink(match, true)) return false;
  }
  return done == text.size() || sink({done, text.size()}, false);
}

std::string translate_pattern(std::string_view pattern) { return Translator(pattern).run(); }

}  // namespace kvlab::tokenizer
