#include "engine/tokenizer/tokenizer.hpp"

#include <string>
#include <vector>

#include "tests/catch.hpp"
#include "tests/engine/tokenizer_fixture.hpp"
#include "tests/error_of.hpp"

using namespace kvlab;
using namespace kvlab::test;
using Catch::Matchers::ContainsSubstring;

namespace {

std::vector<std::int32_t> range_of(const Tokenizer& tokenizer, const std::vector<std::int32_t>& ids,
                                   const std::string& text) {
  const TokenRange range = covering_tokens(tokenizer, ids, text);
  return {static_cast<std::int32_t>(range.start), static_cast<std::int32_t>(range.tokens)};
}

using Range = std::vector<std::int32_t>;

}  // namespace

TEST_CASE("a passage is covered by the fewest tokens") {
  const Tokenizer tokenizer = load_json(small_tokenizer());
  const std::vector<std::int32_t> ids = tokenizer.encode("abc ab é ca");
  REQUIRE(ids == std::vector<std::int32_t>{264, 259, 263, 259, 198, 172, 259, 262, 260});
  CHECK(range_of(tokenizer, ids, "abc") == Range{0, 1});
  CHECK(range_of(tokenizer, ids, "bc") == Range{0, 1});
  CHECK(range_of(tokenizer, ids, "c a") == Range{0, 3});
  CHECK(range_of(tokenizer, ids, " ab") == Range{1, 2});
  CHECK(range_of(tokenizer, ids, "b ") == Range{2, 2});
  CHECK(range_of(tokenizer, ids, "é") == Range{4, 2});
  CHECK(range_of(tokenizer, ids, "ca") == Range{7, 2});
  CHECK(range_of(tokenizer, ids, "abc ab é ca") == Range{0, 9});
}

TEST_CASE("a special token at the start counts as a token, but not as text") {
  const Tokenizer tokenizer = load_json(small_tokenizer());
  CHECK(range_of(tokenizer, {1, 264, 262}, "abcc") == Range{1, 2});
  CHECK(range_of(tokenizer, {1, 262, 1, 264}, "<s>abc") == Range{2, 2});
  CHECK_THROWS(covering_tokens(tokenizer, std::vector<std::int32_t>{1, 264, 262}, "<s>"));
}

TEST_CASE("the error quotes a passage that does not occur exactly once") {
  const Tokenizer tokenizer = load_json(small_tokenizer());
  const auto refusal = [&](const std::vector<std::int32_t>& ids, const std::string& text) {
    return error_of<std::invalid_argument>([&] { covering_tokens(tokenizer, ids, text); });
  };
  const std::vector<std::int32_t> ids = tokenizer.encode("aa ab");
  CHECK_THAT(refusal(ids, "ba"), ContainsSubstring("\"ba\" is not in the prompt"));
  CHECK_THAT(refusal(ids, ""), ContainsSubstring("\"\" is not in the prompt"));
  CHECK_THAT(refusal({}, "a"), ContainsSubstring("\"a\" is not in the prompt"));
  CHECK_THAT(refusal(ids, "a"), ContainsSubstring("\"a\" appears in the prompt more than once"));
  CHECK_THAT(refusal(tokenizer.encode("aaa"), "aa"), ContainsSubstring("more than once"));
  CHECK_THAT(refusal(ids, std::string(1000, 'x')), ContainsSubstring("xxx...\" is not"));
}
