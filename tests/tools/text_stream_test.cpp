#include "engine/loop/text_stream.hpp"

#include <utf8proc.h>

#include "tests/catch.hpp"

using namespace kvlab;

namespace {

bool is_valid(const std::string& text) {
  std::string copy = text;
  return take_utf8(copy, true) == text;
}

}  // namespace

TEST_CASE("A character that may still be completed is kept back") {
  const std::string whole = GENERATE("\xc3\xa9", "\xe2\x82\xac", "\xed\x9f\xbf", "\xf0\x9f\x98\x80",
                                     "\xf4\x8f\xbf\xbf", "\xe0\xa4\xb9");
  for (std::size_t cut = 1; cut < whole.size(); ++cut) {
    std::string bytes = "ab" + whole.substr(0, cut);
    CHECK(take_utf8(bytes, false) == "ab");
    bytes += whole.substr(cut);
    CHECK(take_utf8(bytes, false) == whole);
    CHECK(bytes.empty());
  }
}

TEST_CASE("Bytes that cannot be part of a character become U+FFFD") {
  const std::string bad = "\xef\xbf\xbd";
  std::string bytes =
      "a\x80"
      "b\xff\xc3"
      "c";
  CHECK(take_utf8(bytes, false) == "a" + bad + "b" + bad + bad + "c");
  bytes = "\xed\xa0";  // would be a surrogate
  CHECK(take_utf8(bytes, false) == bad + bad);
  bytes = "x\xe2\x82";
  CHECK(take_utf8(bytes, false) == "x");
  CHECK(take_utf8(bytes, true) == bad + bad);
}

TEST_CASE("Streamed text is the text, in whole characters") {
  const Tokenizer tokenizer =
      Tokenizer::load(KVLAB_SOURCE_DIR "/engine/models/tiny/tokenizer.json");
  std::string text;
  for (int i = 0; i < 20; ++i)
    text += " It was late; na\xc3\xafve \xf0\x9f\x98\x80\xe2\x82\xac.\n\n";
  const auto ids = tokenizer.encode(text, false);
  REQUIRE(ids.size() > 100);
  TextStream stream(tokenizer, {});
  std::string streamed;
  for (const std::int32_t id : ids) {
    const std::string piece = stream.add(id);
    CHECK(is_valid(piece));
    streamed += piece;
  }
  CHECK(streamed + stream.finish() == text);
}
