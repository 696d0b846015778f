#include "engine/evaluation/conversation.hpp"

#include <malloc.h>
#include <utf8proc.h>

#include <fstream>

#include "tests/catch.hpp"
#include "tools/terminal.hpp"
#include "traces/base/json.hpp"

using namespace kvlab;

namespace {

bool is_valid(const std::string& text) {
  std::string copy = text;
  return take_utf8(copy, true) == text;
}

}  // namespace

TEST_CASE("Streams that are still referenced outlive the terminal") {
  std::FILE *out = nullptr, *error = nullptr;
  mallopt(M_PERTURB, 0xa5);  // makes free() overwrite the memory
  {
    const kvlab::Terminal terminal;
    out = stdout;
    error = stderr;
  }
  CHECK(stdout != out);
  CHECK(stderr != error);
  CHECK(std::fflush(out) == 0);
  CHECK(std::fputs("a word", error) >= 0);
  mallopt(M_PERTURB, 0);
}

TEST_CASE("A character that may still be completed is held back") {
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
  bytes = "\xed\xa0";  // these bytes would begin a surrogate
  CHECK(take_utf8(bytes, false) == bad + bad);
  bytes = "x\xe2\x82";
  CHECK(take_utf8(bytes, false) == "x");
  CHECK(take_utf8(bytes, true) == bad + bad);
}

TEST_CASE("Streamed pieces are whole characters, and together equal the text") {
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

TEST_CASE("A prompt's ids equal AutoTokenizer's, except that a first token is not added twice") {
  const std::string root = KVLAB_SOURCE_DIR "/";
  const auto cases = nlohmann::json::parse(
      std::ifstream(root + "tests/data/tokenizer/cases.json", std::ios::binary));
  for (const auto& row : cases.at("transformers")) {
    CAPTURE(row.dump());
    const auto tokenizer = Tokenizer::load(
        root +
        cases.at("tokenizers").at(row.at("tokenizer")).at("file").get_ref<const std::string&>());
    const std::string text = row.at("text");
    std::vector<std::int32_t> expected = row.at("ids");
    const bool doubled = expected.size() > 1 && expected[0] == expected[1];
    if (doubled) expected.erase(expected.begin());
    CHECK(doubled == (!tokenizer.before().empty() && text.starts_with('<')));
    CHECK(encode_prompt(tokenizer, text) == expected);
    if (!expected.empty())
      CHECK(encode_prompt(tokenizer, text, 1) == std::vector<std::int32_t>{expected.front()});
  }
}
