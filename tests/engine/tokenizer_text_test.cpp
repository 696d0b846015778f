#include "engine/tokenizer/text.hpp"

#include <string>
#include <utility>
#include <vector>

#include "engine/tokenizer/pattern.hpp"
#include "tests/catch.hpp"
#include "tests/error_of.hpp"
#include "tests/traces/temporary_folder.hpp"

namespace kvlab::tokenizer {
namespace {

const std::string kBad = "\uFFFD";

std::vector<std::string> cut(const Pattern& pattern, const std::string& text) {
  std::vector<std::string> pieces;
  pattern.cut(text, MatchTime(text.size()), [&](ByteRange range, bool) {
    pieces.push_back(text.substr(range.begin, range.end - range.begin));
    return true;
  });
  return pieces;
}

bool contains(const std::string& text, const std::string& part) {
  UNSCOPED_INFO(text << "  should contain  " << part);
  return text.find(part) != text.npos;
}

}  // namespace

TEST_CASE("each maximal invalid part of UTF-8 becomes one U+FFFD") {
  // Python's bytes.decode("utf-8", errors="replace") gives the same results.
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"plain", "plain"},
      {"\xC3\xA9\xE7\x9A\x84\xF0\x9F\x98\x80", "\u00E9\u7684\U0001F600"},
      {"\x80", kBad},
      {"\xFF", kBad},
      {"a\xFE\xFF"
       "b",
       "a" + kBad + kBad + "b"},
      {"\xC0\x80", kBad + kBad},                        // overlong NUL
      {"\xC1\xBF", kBad + kBad},                        // overlong
      {"\xE0\x80\x80", kBad + kBad + kBad},             // overlong
      {"\xF0\x80\x80\x80", kBad + kBad + kBad + kBad},  // overlong
      {"\xED\xA0\x80", kBad + kBad + kBad},             // surrogate
      {"\xED\x9F\xBF", "\uD7FF"},                       // just below the surrogates
      {"\xF4\x90\x80\x80", kBad + kBad + kBad + kBad},  // above U+10FFFF
      {"\xF4\x8F\xBF\xBF", "\U0010FFFF"},
      {"\xF5\x80", kBad + kBad},
      {"\xE7\x9A", kBad},  // cut at the end
      {"\xE7\x9A"
       "a",
       kBad + "a"},  // cut in the middle
      {"\xF0\x9F\x98", kBad},
      {"\xF0\x9F\x98\xC3\xA9", kBad + "\u00E9"},
      {"\xF0\x9F", kBad},
      {"\xE7", kBad},
      {"\xE7\xE7\x9A\x84", kBad + "\u7684"},
      {"\xE1\x80\xE2\xF0\x91\x92\xF1\xBF"
       "A",
       kBad + kBad + kBad + kBad + "A"},
  };
  for (const auto& [bytes, text] : cases) {
    INFO(text);
    CHECK(replace_invalid_utf8(bytes) == text);
  }
}

TEST_CASE("code points are read and written") {
  for (const char32_t c : {U'\0', U'a', U'\u007F', U'\u0080', U'\u07FF', U'\u0800', U'\uFFFF',
                           U'\U00010000', U'\U0010FFFF'}) {
    std::string text;
    append_utf8(text, c);
    CHECK(char_bytes(text[0]) == text.size());
    CHECK(code_point_at(text, 0) == c);
  }
}

TEST_CASE("NFC composes characters, orders marks and leaves the rest") {
  CHECK(nfc("plain") == "plain");
  CHECK(nfc("e\u0301") == "\u00E9");
  CHECK(nfc("e\u0302\u0323") == "\u1EC7");
  CHECK(nfc("q\u0307\u0323") == "q\u0323\u0307");
  CHECK(nfc("\u1100\u1161\u11A8") == "\uAC01");
  CHECK(nfc("\u212B\u2126") == "\u00C5\u03A9");
  CHECK(nfc("\u0958") == "\u0915\u093C");  // NFC excludes this character from composition
  CHECK(nfc("\uFB01") == "\uFB01");        // its decomposition is only a compatibility one
}

TEST_CASE("every byte has its own character in the byte-level alphabet") {
  CHECK(bytes_to_chars("A \n\xFF") == "A\u0120\u010A\u00FF");
  std::string all;
  for (int byte = 0; byte < 256; ++byte) all += static_cast<char>(byte);
  CHECK(chars_to_bytes(bytes_to_chars(all)) == all);
  CHECK(chars_to_bytes("a b") == std::nullopt);
  CHECK(chars_to_bytes("\u7684") == std::nullopt);
}

TEST_CASE("byte tokens are recognized by their spelling") {
  CHECK(fallback_token(0x0A) == "<0x0A>");
  CHECK(byte_of_fallback_token("<0xfF>") == 0xFF);
  for (const char* other : {"<0x0>", "<0x0G>", "<0x 1>", "<0x00A>", "<0x-1>", "0x0A", ""}) {
    CHECK(byte_of_fallback_token(other) == std::nullopt);
  }
}

TEST_CASE("a pattern splits a text at both ends of every match") {
  using Pieces = std::vector<std::string>;
  CHECK(cut(Pattern::regex("\\d{2}"), "a1234b5") == Pieces{"a", "12", "34", "b5"});
  CHECK(cut(Pattern::regex("\\d+"), "a\u0661\u0662") == Pieces{"a", "\u0661\u0662"});
  CHECK(cut(Pattern::literal("a."), "xa.ya+") == Pieces{"x", "a.", "ya+"});
  CHECK(cut(Pattern::regex("\\s+(?!\\S)|\\s+"), "a   b") == Pieces{"a", "  ", " ", "b"});
  CHECK(cut(Pattern::regex("\\u00e9"), "caf\u00E9s") == Pieces{"caf", "\u00E9", "s"});
  CHECK(cut(Pattern::regex("x"), "").empty());
}

TEST_CASE("white space is what Unicode defines, without U+180E") {
  CHECK(cut(Pattern::regex("\\s"), "\u0085\u00A0\u3000\u180E").size() == 4);
  CHECK(cut(Pattern::regex("\\S"), "\u180E\u180E").size() == 2);
  CHECK(cut(Pattern::regex("[^\\s]"), "\u180E\u180E").size() == 2);
}

TEST_CASE("patterns that Oniguruma and PCRE2 read differently are refused by name") {
  using test::error_of;
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"\\w+", "escape \\w at offset 0"},
      {"a\\bb", "escape \\b at offset 1"},
      {"\\p{Han}", "not a general category"},
      {"\\p{^L}", "not a general category"},
      {"\\pL", "not a general category"},
      {"\\p{", "not a general category"},
      {"^a", "an anchor at offset 0"},
      {"a$", "an anchor at offset 1"},
      {"[a[b]]", "a class within a class"},
      {"[a&&b]", "an intersection of classes"},
      {"[]a]", "a class that begins with ]"},
      {"[abc", "an unfinished class"},
      {"[abc\\", "an unfinished escape"},
      {"\\u12", "an unfinished \\u"},
      {"(?P<x>a)", "a group that begins with (?"},
      {"(*ACCEPT)a", "a group that begins with (*"},
      {"(?R)a", "a group that begins with (?"},
      {"a{,2}", "a bare {"},
      {"a{1,2}+", "a quantifier after }"},
      {"(a", "does not compile"},
      {"a**", "does not compile"},
      {"a*", "can match nothing"},
      {"(?=a)", "can match nothing"},
      {std::string(20'000, 'a'), "20000 bytes; at most 16384"},
      {"(((a{60000}){60000}){60000})", "does not compile"},
  };
  for (const auto& [pattern, message] : cases) {
    INFO(pattern.substr(0, 80));
    const std::string error = error_of([&p = pattern] { Pattern::regex(p); });
    CHECK(contains(error, message));
    CHECK(error.find('\n') == error.npos);
  }
}

TEST_CASE("a pattern with exponential backtracking is stopped") {
  const auto pattern = Pattern::regex("(?:a+)+[bc]");
  const std::string text(100'000, 'a');
  CHECK(contains(test::error_of([&] { cut(pattern, text); }), "cannot split this text"));
}

TEST_CASE("a pattern whose matches together take too long is stopped") {
  const auto pattern = Pattern::regex("(?:a|aa){20}[bc]|a");
  CHECK(cut(pattern, std::string(30, 'a')).size() == 30);
  CHECK(contains(test::error_of([&] { cut(pattern, std::string(5'000, 'a')); }),
                 "takes more than 1.1 s for 5000 bytes"));
}

TEST_CASE("a match is found however far away it is") {
  std::string before;
  for (int i = 0; i < 5'000; ++i) {
    if (i % 100 == 0) CHECK(cut(Pattern::regex("x+"), before + "xx").back() == "xx");
    before += i % 3 ? "\u00E9" : "\u3000";
  }
}

}  // namespace kvlab::tokenizer
