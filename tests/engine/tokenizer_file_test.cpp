// Tests of the settings of a tokenizer.json that are supported, and of those that are refused.
#include <string>
#include <vector>

#include "tests/catch.hpp"
#include "tests/engine/tokenizer_fixture.hpp"
#include "tests/error_of.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

using nlohmann::json;
using test::load_json;
using test::load_text;
using test::small_tokenizer;
using Ids = std::vector<std::int32_t>;

// The ids of small_tokenizer().
constexpr std::int32_t kMark = 259, kA = 260, kB = 261, kAbc = 264, kMarkA = 265;

json metaspace(const std::string& scheme, bool split) {
  return {
      {"type", "Metaspace"}, {"replacement", "▁"}, {"prepend_scheme", scheme}, {"split", split}};
}

json added(std::int32_t id, const std::string& content, const json& more) {
  json token = {{"id", id}, {"content", content}, {"special", false}, {"normalized", false}};
  token.update(more);
  return token;
}

bool contains(const std::string& text, const std::string& part) {
  UNSCOPED_INFO(text << "  should contain  " << part);
  return text.find(part) != text.npos;
}

}  // namespace

TEST_CASE("merges are read as strings and as pairs") {
  json file = small_tokenizer();
  const Ids expected = load_json(file).encode("ab abc b");
  file["model"]["merges"] = json::parse(R"([["a","b"],["ab","c"],["▁","a"]])");
  CHECK(load_json(file).encode("ab abc b") == expected);
}

TEST_CASE("the merge with the lowest rank comes first, and of equal ranks the leftmost") {
  const Tokenizer tokenizer = load_json(small_tokenizer());
  CHECK(tokenizer.encode("abc") == Ids{kAbc});
  CHECK(tokenizer.encode(" abc") == Ids{kMark, kAbc});
  CHECK(tokenizer.encode(" ac") == Ids{kMarkA, 262});
  CHECK(tokenizer.encode("aab") == Ids{kA, 263});
}

TEST_CASE("ids may have gaps") {
  json file = small_tokenizer();
  file["model"]["vocab"]["c"] = 5'000'000;
  file["added_tokens"].push_back(added(7'000'000, "<x>", json::object()));
  const Tokenizer tokenizer = load_json(file);
  CHECK(tokenizer.encode("c<x>") == Ids{5'000'000, 7'000'000});
  CHECK(tokenizer.decode(Ids{5'000'000, 7'000'000}) == "c<x>");
  CHECK(tokenizer.vocab_size() == 7'000'001);
  CHECK(tokenizer.id_of("<x>") == 7'000'000);
  CHECK(tokenizer.id_of("abc") == kAbc);
  CHECK(tokenizer.id_of("nothing") == std::nullopt);
  CHECK_THROWS_AS(tokenizer.decode(Ids{6'000'000}), std::out_of_range);
}

TEST_CASE(
    "ids of the model that its tokenizer lacks decode to nothing; ids that the model lacks are "
    "refused") {
  const test::TemporaryFolder folder;
  const auto path = folder / "tokenizer.json";
  write_file_atomically(path, small_tokenizer().dump());
  const std::size_t size = Tokenizer::load(path).vocab_size();
  const auto padded = Tokenizer::load(path, size + 100);
  const auto last = static_cast<std::int32_t>(size + 99);
  CHECK(padded.decode(Ids{kAbc, last, kAbc}) == "abcabc");
  CHECK_THROWS_AS(padded.decode(Ids{last + 1}), std::out_of_range);
  CHECK_THROWS_AS(padded.decode(Ids{-1}), std::out_of_range);
  CHECK_THROWS_WITH(Tokenizer::load(path, 2 * size + 1),
                    Catch::Matchers::ContainsSubstring("of this model"));
  CHECK_THROWS_WITH(
      Tokenizer::load(path, kAbc).encode("abc"),
      Catch::Matchers::ContainsSubstring("tokenizer.json: the text has the token id"));
}

TEST_CASE("Metaspace prepends its mark always, only at the start, or never") {
  json file = small_tokenizer();
  file["pre_tokenizer"] = metaspace("always", true);
  CHECK(load_json(file).encode("a<s>a") == Ids{kMarkA, 1, kMarkA});
  file["pre_tokenizer"] = metaspace("first", true);
  CHECK(load_json(file).encode("a<s>a") == Ids{kMarkA, 1, kA});
  CHECK(load_json(file).encode("<s>a") == Ids{1, kA});
  file["pre_tokenizer"] = metaspace("never", true);
  CHECK(load_json(file).encode("a<s>a") == Ids{kA, 1, kA});
  CHECK(load_json(file).encode("a a") == Ids{kA, kMarkA});

  file["pre_tokenizer"] = {
      {"type", "Metaspace"}, {"replacement", "▁"}, {"add_prefix_space", false}};
  CHECK(load_json(file).encode("a") == Ids{kA});
}

TEST_CASE("Metaspace may leave the text unsplit, so that merges cross spaces") {
  json file = small_tokenizer();
  file["model"]["vocab"]["b▁"] = 300;
  file["model"]["merges"].push_back("b ▁");
  file["pre_tokenizer"] = metaspace("never", true);
  CHECK(load_json(file).encode("b b") == Ids{kB, kMark, kB});
  file["pre_tokenizer"] = metaspace("never", false);
  CHECK(load_json(file).encode("b b") == Ids{300, kB});
}

TEST_CASE("Metaspace with the scheme first marks only the first piece of a text") {
  json file = small_tokenizer();
  const json split = {{"type", "Split"}, {"pattern", {{"Regex", "c"}}}, {"behavior", "Isolated"}};
  file["pre_tokenizer"] = {{"type", "Sequence"},
                           {"pretokenizers", {split, metaspace("first", true)}}};
  CHECK(load_json(file).encode("aca") == Ids{kMarkA, 262, kA});
}

TEST_CASE("ByteLevel may put a space before the text") {
  json file = json::parse(
      test::read_bytes(std::string(KVLAB_SOURCE_DIR) + "/tests/data/tokenizer/qwen2.json"));
  file["pre_tokenizer"] = {{"type", "ByteLevel"}, {"add_prefix_space", false}};
  const Tokenizer plain = load_json(file);
  file["pre_tokenizer"]["add_prefix_space"] = true;
  const Tokenizer prefixed = load_json(file);
  CHECK(prefixed.encode("the fox") == plain.encode(" the fox"));
  CHECK(prefixed.encode(" the fox") == plain.encode(" the fox"));
  CHECK(plain.encode("the fox") != plain.encode(" the fox"));
}

TEST_CASE("a character outside the vocabulary is encoded as bytes, or else as the unknown token") {
  json file = small_tokenizer();
  CHECK(load_json(file).encode("é") == Ids{3 + 0xC3, 3 + 0xA9});
  file["model"]["byte_fallback"] = false;
  CHECK(load_json(file).encode("aéüb") == Ids{kA, 0, 0, kB});
  file["model"]["fuse_unk"] = true;
  CHECK(load_json(file).encode("aéüb") == Ids{kA, 0, kB});
}

TEST_CASE("added tokens strip white space and respect words according to their options") {
  json file = small_tokenizer();
  file["added_tokens"].push_back(added(400, "[l]", {{"lstrip", true}}));
  file["added_tokens"].push_back(added(401, "[r]", {{"rstrip", true}}));
  file["added_tokens"].push_back(added(402, "ca", {{"single_word", true}}));
  file["added_tokens"].push_back(added(403, "[r]]", json::object()));
  file["added_tokens"].push_back(added(404, "\n\t\n", json::object()));
  const Tokenizer tokenizer = load_json(file);
  CHECK(tokenizer.encode("a \t [l] a") == Ids{kA, 400, kMarkA});
  CHECK(tokenizer.encode("a [r] \n a") == Ids{kA, kMark, 401, kA});
  CHECK(tokenizer.encode("[r]  [l]") == Ids{401, 400});
  CHECK(tokenizer.encode("ca") == Ids{402});
  CHECK(tokenizer.encode("(ca)") == Ids{3 + '(', 402, 3 + ')'});
  CHECK(tokenizer.encode("cab") == Ids{262, 263});
  CHECK(tokenizer.encode("aca") == Ids{kA, 262, kA});
  CHECK(tokenizer.encode("[r]]") == Ids{403});
  CHECK(tokenizer.encode("[r]]\n\t\n") == Ids{403, 404});
}

TEST_CASE("a normalized added token is matched in the normalized text") {
  json file = small_tokenizer();
  file["normalizer"] = {{"type", "NFC"}};
  file["added_tokens"].push_back(added(400, "e\u0301", {{"normalized", true}}));
  file["added_tokens"].push_back(added(401, "u\u0308", json::object()));
  const Tokenizer tokenizer = load_json(file);
  CHECK(tokenizer.encode("\u00E9") == Ids{400});
  CHECK(tokenizer.encode("e\u0301") == Ids{400});
  CHECK(tokenizer.encode("u\u0308") == Ids{401});
  CHECK(tokenizer.encode("\u00FC") == Ids{3 + 0xC3, 3 + 0xBC});
  CHECK(tokenizer.decode(Ids{400, 401}) == "\u00E9u\u0308");
}

TEST_CASE("a byte-level tokenizer drops a byte without a token, as the tokenizers library does") {
  auto file = json::parse(
      test::read_bytes(std::string(KVLAB_SOURCE_DIR) + "/tests/data/tokenizer/qwen2.json"));
  const Tokenizer whole = load_json(file);
  REQUIRE(whole.encode("a\x04z").size() == 3);
  file["model"]["vocab"].erase("\u0104");
  const Tokenizer lacking = load_json(file);
  CHECK(lacking.encode("a\x04z") == Ids{whole.encode("a")[0], whole.encode("z")[0]});
  CHECK(lacking.encode("\x04").empty());
}

TEST_CASE("an added token beside byte-level tokens is decoded literally") {
  json file = json::parse(
      test::read_bytes(std::string(KVLAB_SOURCE_DIR) + "/tests/data/tokenizer/qwen2.json"));
  file["added_tokens"].push_back(added(900, "\u00E9t\u00E9", json::object()));
  const Tokenizer tokenizer = load_json(file);
  CHECK(tokenizer.encode("\u00E9t\u00E9") == Ids{900});
  CHECK(tokenizer.decode(Ids{900}) == "\u00E9t\u00E9");
}

TEST_CASE("templates add tokens before and after the text, and a later template adds outer ones") {
  const auto single = [](const std::string& before, const std::string& after) {
    json items = json::array();
    if (!before.empty()) items.push_back({{"SpecialToken", {{"id", before}, {"type_id", 0}}}});
    items.push_back({{"Sequence", {{"id", "A"}, {"type_id", 0}}}});
    if (!after.empty()) items.push_back({{"SpecialToken", {{"id", after}, {"type_id", 0}}}});
    return json{{"type", "TemplateProcessing"},
                {"single", items},
                {"special_tokens",
                 {{"<s>", {{"id", "<s>"}, {"ids", {1}}, {"tokens", {"<s>"}}}},
                  {"</s>", {{"id", "</s>"}, {"ids", {2}}, {"tokens", {"</s>"}}}}}}};
  };
  json file = small_tokenizer();
  file["post_processor"] = single("<s>", "</s>");
  CHECK(load_json(file).encode("a") == Ids{1, kA, 2});
  CHECK(load_json(file).encode("a", false) == Ids{kA});
  file["post_processor"] = {
      {"type", "Sequence"},
      {"processors", {single("<s>", ""), {{"type", "ByteLevel"}}, single("</s>", "</s>")}}};
  CHECK(load_json(file).encode("a") == Ids{2, 1, kA, 2});
}

TEST_CASE("truncation and padding in the file do not change a text's ids") {
  json file = small_tokenizer();
  file["truncation"] = {{"max_length", 1}};
  file["padding"] = {{"strategy", {{"Fixed", 9}}}};
  CHECK(load_json(file).encode("ab") == Ids{263});
}

TEST_CASE("a missing or broken file gives a one-line error that names it") {
  CHECK(contains(test::error_of([] { Tokenizer::load("/nowhere/tokenizer.json"); }),
                 "/nowhere/tokenizer.json"));
  const std::string whole = small_tokenizer().dump();
  for (const std::string& text :
       {std::string(), std::string("{"), std::string("[]"), std::string("null"), std::string("{}"),
        std::string("\xFF\xFE"), whole.substr(0, whole.size() / 2), whole + "}",
        std::string(100'000, '[')}) {
    const std::string error = test::error_of([&] { load_text(text); });
    INFO(text.substr(0, 40) << ": " << error);
    CHECK(contains(error, "tokenizer.json: "));
    CHECK(error.find('\n') == error.npos);
  }
}

TEST_CASE("wrong or unsupported settings are named") {
  struct Bad {
    std::string at, value;  ///< an empty value removes the key
    std::string says;
  };
  const std::string huge = '"' + std::string(5000, 'a') + '"';
  std::string nested = R"({"type": "NFC"})";
  for (int depth = 0; depth < 12; ++depth)
    nested = R"({"type": "Sequence", "normalizers": [)" + nested + "]}";
  const auto token = [](int id, const std::string& content) {
    return R"({"id": )" + std::to_string(id) + R"(, "content": )" + content +
           R"(, "special": false, "normalized": false})";
  };
  const std::string merge = "/model/merges/", vocab = "/model/vocab/", added = "/added_tokens/-";
  const std::vector<Bad> all{
      {"/model", "", R"("model" is missing)"},
      {"/model", "3", "model: this is 3; a JSON object is expected"},
      {"/model/type", R"("Unigram")", R"(model.type "Unigram" is not supported)"},
      {"/model/vocab", "", R"(model: key "vocab" is missing)"},
      {"/model/vocab", "[]", "model.vocab: this is []; a JSON object"},
      {"/model/vocab", "{}", "model.vocab is empty"},
      {"/model/merges", "", R"("merges" is missing)"},
      {"/model/merges", R"("a b")", R"("merges" is "a b"; an array)"},
      {merge + "1", R"("abc")", "model.merges[1] must be two tokens"},
      {merge + "1", R"("a b c")", "model.merges[1] must be two tokens"},
      {merge + "1", R"(["a"])", "model.merges[1] must be"},
      {merge + "1", "[1, 2]", "model.merges[1] must be"},
      {merge + "2", R"("a x")", R"(model.merges[2]: token "x" is not)"},
      {merge + "2", R"("c b")", R"(model.merges[2]: token "cb" is not)"},
      {vocab + "a", "261", "two tokens have id 261"},
      {vocab + "a", "-1", "token id from 0 to 16777215"},
      {vocab + "a", "16777216", "token id from 0 to 16777215"},
      {vocab + "a", "1e300", "token id from 0 to 16777215"},
      {vocab + "a", "18446744073709551615", "token id from 0 to 16777215"},
      {vocab + "a", R"("1")", "token id from 0 to 16777215"},
      {vocab + "a", "1.5", "token id from 0 to 16777215"},
      {"/model/unk_token", R"("?")", R"(model.unk_token "?" is not in)"},
      {"/model/unk_token", "0", R"("unk_token" is 0; a string)"},
      {"/model/fuse_unk", "1", R"("fuse_unk" is 1; true or false)"},
      {"/model/dropout", "0.1", "model.dropout is not supported"},
      {"/model/end_of_word_suffix", R"("</w>")", "model.end_of_word_suffix"},
      {"/model/continuing_subword_prefix", R"("##")", "model.continuing_subword_prefix"},
      {"/normalizer", R"({"type": "NFKC"})", R"(normalizer "NFKC" is not supp)"},
      {"/normalizer", R"("NFC")", R"(normalizer: this is "NFC"; a JSON object)"},
      {"/normalizer", R"({"type": "Replace", "pattern": {"Regex": " +"}, "content": ""})",
       "only a String is supported"},
      {"/normalizer", R"({"type": "Replace", "pattern": {"String": ""}, "content": "a"})",
       "normalizer.pattern.String is empty"},
      {"/normalizer", R"({"type": "Prepend", "prepend": )" + huge + "}",
       "normalizer.prepend has more than 1024 bytes"},
      {"/normalizer", nested, "sequences nest deeper than 8"},
      {"/pre_tokenizer", R"({"type": "BertPreTokenizer"})",
       R"(pre_tokenizer: pre-tokenizer "BertPreTokenizer" is not supported)"},
      {"/pre_tokenizer",
       R"({"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}, {"type": "Digits"}]})",
       R"(pre_tokenizer.pretokenizers[1]: "Digits" after ByteLevel)"},
      {"/pre_tokenizer", R"({"type": "Split", "pattern": {"Regex": "a"}, "behavior": "Removed"})",
       R"(Split behavior "Removed" is not supported)"},
      {"/pre_tokenizer", R"({"type": "Split", "pattern": {"Regex": "(a"}, "behavior": "Isolated"})",
       "pre_tokenizer.pattern.Regex: the pattern does not compile"},
      {"/pre_tokenizer/prepend_scheme", R"("last")", "always, first or never"},
      {"/pre_tokenizer/replacement", R"("__")", "must be one character"},
      {"/post_processor", R"({"type": "BertProcessing"})",
       R"(post-processor "BertProcessing" is not supported)"},
      {"/post_processor", R"({"type": "TemplateProcessing", "single": []})",
       "post_processor.single has no sequence A"},
      {"/post_processor",
       R"({"type": "TemplateProcessing", "single": [{"Sequence": {"id": "B"}}]})",
       "post_processor.single[0]: the text must appear once"},
      {"/post_processor",
       R"({"type": "TemplateProcessing", "special_tokens": {"x": {"ids": [9999]}},
           "single": [{"SpecialToken": {"id": "x"}}, {"Sequence": {"id": "A"}}]})",
       "post_processor: token id 9999 is not in the vocabulary"},
      {"/decoder", "null", "decoder is missing"},
      {"/decoder", R"({"type": "WordPiece"})", R"(decoder "WordPiece" is not)"},
      {"/decoder/decoders/-", R"({"type": "ByteLevel"})",
       "decoder.decoders[3]: ByteLevel must come first"},
      {"/decoder", R"({"type": "Strip", "content": " ", "start": -1, "stop": 0})",
       "decoder.start must be 0 or more"},
      {"/added_tokens", "1", R"("added_tokens" is 1; an array)"},
      {"/added_tokens/1/id", "", R"(added_tokens[1]: key "id" is missing)"},
      {added, token(500, R"("")"), "content is empty"},
      {added, token(500, huge), "added_tokens[3].content has more than 1024 bytes"},
      {added, token(1, R"("<t>")"), R"(added_tokens[3]: id 1 is already that of "<s>")"},
      {added, token(500, R"("<s>")"), R"(added_tokens[3]: "<s>" already has id 1)"},
      {added, token(260, R"("<t>")"), R"(id 260 of "<t>" is already that of "a")"},
      {added, token(500, R"("abc")"), R"("abc" has id 500, but 264 in model.vocab)"}};
  const auto check = [](const json& file, const std::string& says) {
    const std::string error = test::error_of([&] { load_json(file); });
    CHECK(contains(error, says));
    CHECK(contains(error, "tokenizer.json: "));
    CHECK(error.find('\n') == error.npos);
    CHECK(error.size() < 400);
  };
  for (const Bad& bad : all) {
    json change{{"op", bad.value.empty() ? "remove" : "add"}, {"path", bad.at}};
    if (bad.at.starts_with(merge)) change["op"] = "replace";
    if (!bad.value.empty()) change["value"] = json::parse(bad.value);
    check(small_tokenizer().patch(json::array({change})), bad.says);
  }
  json lost = small_tokenizer();
  lost["model"]["unk_token"] = nullptr;
  lost["model"]["vocab"].erase("<0x41>");
  check(lost, "would be lost");
}

TEST_CASE("a normalizer that expands a text too much is stopped") {
  json file = small_tokenizer();
  const json step = {
      {"type", "Replace"}, {"pattern", {{"String", "a"}}}, {"content", std::string(1000, 'a')}};
  file["normalizer"] = {{"type", "Sequence"}, {"normalizers", {step, step, step, step, step}}};
  const Tokenizer tokenizer = load_json(file);
  CHECK(contains(test::error_of([&] { tokenizer.encode("aaaa"); }), "more than 64 times as long"));
}

}  // namespace kvlab
