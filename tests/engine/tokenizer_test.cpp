// Compares the tokenizer with the tokenizers library. tests/fixtures/make_tokenizer_fixtures.py
// made the cases.
#include "engine/tokenizer/tokenizer.hpp"

#include <cstdint>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "engine/tokenizer/text.hpp"
#include "tests/catch.hpp"
#include "tests/skip.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

using Ids = std::vector<std::int32_t>;

const std::filesystem::path kRoot = KVLAB_SOURCE_DIR;

const nlohmann::json& cases() {
  static const auto json = nlohmann::json::parse(
      std::ifstream(kRoot / "tests/data/tokenizer/cases.json", std::ios::binary));
  return json;
}

std::filesystem::path file_of(const std::string& tokenizer) {
  return kRoot / cases().at("tokenizers").at(tokenizer).at("file").get<std::string>();
}

std::string fnv1a(const Ids& ids) {
  std::uint64_t value = 0xCBF29CE484222325u;
  for (const std::int32_t id : ids) {
    for (int shift = 0; shift < 32; shift += 8) {
      value = (value ^ (static_cast<std::uint32_t>(id) >> shift & 0xFF)) * 0x100000001B3u;
    }
  }
  char hex[17];
  std::snprintf(hex, sizeof hex, "%016llx", static_cast<unsigned long long>(value));
  return hex;
}

/// Checks the tokenizer of a model that `./dev model NAME` makes, on the same texts.
void check_pretrained(const std::string& name) {
  const auto file = kRoot / "engine/models" / name / "tokenizer.json";
  if (!std::filesystem::exists(file))
    return skip("engine/models/" + name + " is missing; ./dev model " + name + " makes it");
  const auto expected = nlohmann::json::parse(
      std::ifstream(kRoot / "tests/data/tokenizer" / (name + "_ids.json"), std::ios::binary));
  const auto texts = cases().at("texts").get<std::vector<std::string>>();
  const Tokenizer tokenizer = Tokenizer::load(file);
  std::size_t tokens = 0;
  for (std::size_t i = 0; i < texts.size(); ++i) {
    INFO("text " << i << ": " << nlohmann::json(texts[i]).dump());
    const Ids ids = tokenizer.encode(texts[i]);
    tokens += ids.size();
    REQUIRE(fnv1a(ids) == expected.at("fnv1a").at(i).get<std::string>());
    REQUIRE(tokenizer.decode(ids) == expected.at("decoded").value(std::to_string(i), texts[i]));
  }
  CHECK(tokens == expected.at("tokens").get<std::size_t>());
}

std::string repeated(const std::string& unit, std::size_t times) {
  std::string text;
  for (std::size_t i = 0; i < times; ++i) text += unit;
  return text;
}

}  // namespace

TEST_CASE("ids and decoded text equal the library's for every text and tokenizer") {
  const auto texts = cases().at("texts").get<std::vector<std::string>>();
  REQUIRE(texts.size() == 500);
  for (const auto& [name, expected] : cases().at("tokenizers").items()) {
    const Tokenizer tokenizer = Tokenizer::load(file_of(name));
    const auto& decoded = expected.at("decoded");
    for (std::size_t i = 0; i < texts.size(); ++i) {
      INFO(name << ", text " << i << ": " << nlohmann::json(texts[i]).dump());
      const Ids ids = tokenizer.encode(texts[i]);
      REQUIRE(ids == expected.at("ids").at(i).get<Ids>());
      // The list has the decoded text only if it differs from the original text. The causes are
      // special tokens, NFC and unknown characters.
      const auto listed = decoded.find(std::to_string(i));
      const std::string back = listed == decoded.end() ? texts[i] : listed->get<std::string>();
      REQUIRE(tokenizer.decode(ids) == back);
    }
  }
}

TEST_CASE("ids of SmolLM2's tokenizer, which lacks byte tokens, equal the library's") {
  check_pretrained("smollm2");
}

TEST_CASE("ids of Gemma 3's tokenizer, with half a million merges, equal the library's") {
  check_pretrained("gemma3");
}

TEST_CASE("ids of Qwen2.5's tokenizer equal the library's") { check_pretrained("qwen2.5"); }

TEST_CASE(
    "ids of long texts without a break equal the library's, and take less than quadratic "
    "time") {
  for (const auto& expected : cases().at("long")) {
    const auto name = expected.at("tokenizer").get<std::string>();
    INFO(name);
    const std::string text = repeated(expected.at("unit"), expected.at("times"));
    const Ids ids = Tokenizer::load(file_of(name)).encode(text);
    CHECK(ids.size() == expected.at("count").get<std::size_t>());
    CHECK(fnv1a(ids) == expected.at("fnv1a").get<std::string>());
  }
  // These would take hours if merging, matching white space or ordering marks took quadratic time.
  const auto qwen2 = Tokenizer::load(file_of("qwen2"));
  for (const std::string unit : {"a", " ", "\xCC\x81\xCC\xA3", "<", "\n "}) {
    CHECK(!qwen2.encode(repeated(unit, 1'000'000 / unit.size())).empty());
  }
}

TEST_CASE("the template's tokens can be left out") {
  const auto llama3 = Tokenizer::load(file_of("llama3"));
  const std::int32_t bos = llama3.id_of("<|begin_of_text|>").value();
  Ids with = llama3.encode("Hello, world", true);
  const Ids without = llama3.encode("Hello, world", false);
  REQUIRE(with.front() == bos);
  with.erase(with.begin());
  CHECK(with == without);
  CHECK(llama3.encode("", true) == Ids{bos});
  CHECK(llama3.encode("", false).empty());
}

TEST_CASE("encoding only the first ids of a text gives the first ids of the whole text") {
  for (const std::string name : {"llama3", "llama2", "gemma", "qwen2"}) {
    const auto tokenizer = Tokenizer::load(file_of(name));
    const std::string text = repeated("The quick brown fox, <s> e\u0301. ", 2000);
    const Ids whole = tokenizer.encode(text);
    for (const std::size_t max_ids : {1, 2, 100, 5001}) {
      INFO(name << ", " << max_ids);
      const auto end = whole.begin() + static_cast<std::ptrdiff_t>(max_ids);
      CHECK(tokenizer.encode(text, true, max_ids) == Ids(whole.begin(), end));
    }
    CHECK(tokenizer.encode(text, true, whole.size()) == whole);
  }
}

TEST_CASE("special tokens are decoded on request") {
  const auto llama2 = Tokenizer::load(file_of("llama2"));
  const Ids ids = llama2.encode("so</s>");
  CHECK(llama2.decode(ids, true) == "so");
  CHECK(llama2.decode(ids, false) == "<s> so</s>");
}

TEST_CASE("decoding byte by byte gives the bytes, even within a character") {
  for (const std::string name : {"tiny", "llama3", "qwen2"}) {
    const auto tokenizer = Tokenizer::load(file_of(name));
    const std::string text = "naïve 的 \U0001F469\u200D\U0001F680 e\u0301";
    std::string pieces;
    const Ids ids = tokenizer.encode(text, false);
    for (const std::int32_t id : ids) pieces += tokenizer.decode(Ids{id});
    CHECK(pieces == tokenizer.decode(ids));
  }
  const auto llama2 = Tokenizer::load(file_of("llama2"));
  CHECK(llama2.decode(Ids{llama2.id_of("<0xE7>").value()}) == "\xE7");
}

TEST_CASE("decoding an unknown id throws out_of_range") {
  const auto tiny = Tokenizer::load(file_of("tiny"));
  CHECK(tiny.vocab_size() == 8192);
  CHECK_THROWS_AS(tiny.decode(Ids{8192}), std::out_of_range);
  CHECK_THROWS_AS(tiny.decode(Ids{-1}), std::out_of_range);
}

TEST_CASE("random bytes are encoded as their replacement text and decode to it") {
  std::mt19937 random(7);
  std::vector<Tokenizer> tokenizers;
  for (const char* name : {"tiny", "llama3", "metaspace"}) {
    tokenizers.push_back(Tokenizer::load(file_of(name)));
  }
  // These are bytes that begin, continue and break UTF-8 characters, and some plain ones.
  const std::string alphabet =
      "\xC0\xC2\xC3\xE0\xE7\xED\xEF\xF0\xF4\xF5\xFF\x80\x8F\x90\x9A\xA0\xBF\xBF\x80 a1'<\n" +
      std::string(1, '\0');
  for (int round = 0; round < 3000; ++round) {
    std::string bytes(random() % 24, 0);
    for (char& byte : bytes) byte = alphabet[random() % alphabet.size()];
    const std::string text = tokenizer::replace_invalid_utf8(bytes);
    for (const Tokenizer& tokenizer : tokenizers) {
      const Ids ids = tokenizer.encode(bytes, false);
      REQUIRE(ids == tokenizer.encode(text, false));
      // Metaspace removes the leading space.
      const std::string back = tokenizer.decode(ids);
      REQUIRE((back == text || " " + back == text));
    }
  }
}

}  // namespace kvlab
