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
constexpr std::uint32_t kMaxSteps = 10'000'000;          // from one place of the text on
constexpr std::size_t kPlaces = 16, kMostPlaces = 4096;  // where a match may begin, in one call
constexpr double kSeconds = 1, kSecondsPerByte = 1e-5;
constexpr std::size_t kJitStackStart = 32 * 1024;      // bytes
constexpr std::size_t kJitStackMax = 8 * 1024 * 1024;  // bytes
constexpr std::uint32_t kMaxHeap = 256 * 1024;         // KiB, where there is no JIT

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
T* allocated(T* made) {
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
      allocated(pcre2_compile_context_create(nullptr)));
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
  // Without JIT the interpreter runs it: the same matches, slower.
  pcre2_jit_compile(code.get(), PCRE2_JIT_COMPLETE);
  return code;
}

// What one scan of a text needs.
class Matcher {
 public:
  explicit Matcher(const pcre2_code& code)
      : code_(code),
        data_(allocated(pcre2_match_data_create_from_pattern(&code, nullptr))),
        context_(allocated(pcre2_match_context_create(nullptr))),
        stack_(pcre2_jit_stack_create(kJitStackStart, kJitStackMax, nullptr)) {
    pcre2_set_match_limit(context_.get(), kMaxSteps);
    pcre2_set_heap_limit(context_.get(), kMaxHeap);
    pcre2_jit_stack_assign(context_.get(), nullptr, stack_.get());
  }

  // The first match at or after `from`; false if there is none. Looks from a few places on at a
  // time, for one call cannot be stopped.
  bool find(std::string_view text, std::size_t from, const MatchTime& time, ByteRange& match) {
    for (std::size_t places = kPlaces; from < text.size();
         places = std::min(2 * places, kMostPlaces)) {
      time.check();
      const std::size_t next = start_of_char(text, std::min(from + places, text.size()));
      pcre2_set_offset_limit(context_.get(), next - 1);
      if (find_from(text, from, match)) return true;
      from = next;
    }
    return false;
  }

 private:
  // Where the character begins that is at `at` or behind it.
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
      most_(kSeconds + kSecondsPerByte * static_cast<double>(bytes)),
      began_(of_thread()),
      at_(std::chrono::steady_clock::now()) {}

MatchTime::Seconds MatchTime::of_thread() {
  timespec used{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
  return std::chrono::seconds(used.tv_sec) + std::chrono::nanoseconds(used.tv_nsec);
}

// The clock on the wall is quicker to ask, and never behind the thread's.
void MatchTime::check() const {
  if (std::chrono::steady_clock::now() - at_ < most_ || of_thread() - began_ < most_) return;
  throw std::runtime_error(fmt::format(
      "the tokenizer's pattern cannot split this text: it takes more than {:.1f} s for {} bytes",
      most_.count(), bytes_));
}

bool Pattern::cut(std::string_view text, const MatchTime& time,
                  const std::function<bool(ByteRange range, bool is_match)>& sink) const {
  Matcher matcher(*code_->compiled);
  std::size_t done = 0;
  for (ByteRange match{}; done < text.size() && matcher.find(text, done, time, match);
       done = match.end) {
    // Look-behind could yet leave an empty match; it must not stop the scan.
    if (match.end <= done || match.begin == match.end) break;
    if (match.begin > done && !sink({done, match.begin}, false)) return false;
    if (!sink(match, true)) return false;
  }
  return done == text.size() || sink({done, text.size()}, false);
}

}  // namespace kvlab::tokenizer
