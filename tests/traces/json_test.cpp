#include "traces/base/json.hpp"

#include "tests/catch.hpp"
#include "tests/error_of.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json_fields.hpp"
#include "traces/base/text.hpp"

namespace kvlab {
namespace {

using test::error_of;

std::string parse_error(std::string_view text) {
  return error_of([&] { parse_json(text, "file.json"); });
}

TEST_CASE("Well-formed JSON is parsed") {
  const auto value =
      parse_json(R"({"a": [1, -2, 3.5, "x", null, true, {}], "b": {"c": []}})", "file");
  CHECK(value.dump() == R"({"a":[1,-2,3.5,"x",null,true,{}],"b":{"c":[]}})");
  CHECK(parse_json("7", "file") == 7);
}

TEST_CASE("Broken JSON is refused with the file and the byte offset") {
  for (const char* text : {"", "{", "[1,]", "{\"a\" 1}", "nul", "[1] 2", "\"\xff\"", "[1e999]"}) {
    INFO(text);
    CHECK(parse_error(text).starts_with("file.json: is not valid JSON from byte "));
  }
}

TEST_CASE("Numbers that Python writes but JSON does not allow are named") {
  for (const char* text : {"{\"a\": Infinity}", "{\"a\": -Infinity}", "[1, NaN]"}) {
    const std::string error = parse_error(text);
    INFO(error);
    CHECK(error.find(std::string(text).find("NaN") != std::string::npos ? "NaN" : "Infinity") !=
          std::string::npos);
    CHECK(error.find("is not JSON (Python writes it)") != std::string::npos);
  }
  CHECK(parse_error("[Inf]").starts_with("file.json: is not valid JSON from byte "));
}

TEST_CASE("A NUL does not end a text, so the rest of the text is not ignored") {
  using namespace std::string_view_literals;
  CHECK(parse_error("{}\0"sv) == "file.json: is not valid JSON, because byte 2 is NUL");
  CHECK(parse_error("{}\0 rubbish"sv) == "file.json: is not valid JSON, because byte 2 is NUL");
  CHECK(parse_error("{\"a\0\": 1}"sv)
            .starts_with("file.json: is not valid JSON, because byte 3 is NUL"));
}

TEST_CASE("Terminal control characters are refused in names, and shown escaped") {
  const auto object = parse_json("{\"a\": \"x\\u001b[2J\", \"b\": \"x y\"}", "f");
  const JsonFields fields(object, "f");
  CHECK(fields.text("b") == "x y");
  CHECK(error_of([&] {
          fields.text("a");
        }).ends_with("; text without control characters is expected"));
  CHECK(!has_controls("tokens of \u00e9t\u00e9, \u6f22\u5b57"));
  for (const char* text :
       {"\x1b[2J", "a\nb", "\x7f", "\u0085", "\u202e", "\u2066", "\u200f", "\u061c", "\ufeff",
        "\x9b", "\xc2", "\xe2\x80", "\xf5", "\xed\xa0\x80", "\xc0\x9b"})
    CHECK(has_controls(text));
  CHECK(printable("one\n\n two\tthree\x1b[2J\u202e!") == "one  two three?[2J?!");
  CHECK(without_controls("a\n\x7f\u0085b\u202e \u00e9") == "a   b  \u00e9");
  CHECK(printable("\u00e9t\u00e9") == "\u00e9t\u00e9");
  CHECK(printable("\u011b \u2192 \U0001f600") ==
        "\u011b \u2192 \U0001f600");  // with bytes 0x9b, 0x80
  CHECK(printable("a\x9b"
                  "31m\xe2\x80") == "a?31m?");
  CHECK(printable_lines("one\n\n\ttwo\x1b\x1b\r\n") == "one\n\n\ttwo???\n");
  CHECK(printable_json("{\"a\":\n\"\u202e\x7f\u00e9\"}") == "{\"a\":\n\"\\u202e\\u007f\u00e9\"}");
}

TEST_CASE("The last name of a path does not depend on trailing slashes and dots") {
  for (const char* path : {"a/trace", "a/trace/", "a/trace/.", "a/b/../trace//", "./trace"})
    CHECK(last_name(path) == "trace");
  CHECK(last_name(".") == std::filesystem::current_path().filename());
}

TEST_CASE("A key that appears twice is refused") {
  CHECK(parse_error(R"({"a": {"k": 1, "j": {"k": 2}, "k": 3}})") ==
        R"(file.json: key "k" appears twice; give it once)");
  CHECK(parse_error(R"([{"k": 1}, {"k": 2}])") == "");
}

TEST_CASE("Nesting beyond the limit is refused at any depth") {
  const auto nested = [](std::size_t depth) {
    return std::string(depth, '[') + std::string(depth, ']');
  };
  CHECK(parse_error(nested(kMaxJsonDepth)) == "");
  CHECK(parse_error(nested(kMaxJsonDepth + 1)) == "file.json: nested more than 64 levels deep");
  CHECK(parse_error(std::string(10'000'000, '[')) == "file.json: nested more than 64 levels deep");
}

TEST_CASE("A member with a wrong type or out of range is named with what is expected") {
  const auto object = parse_json(
      R"({"n": 5, "f": 2.5, "s": "text", "z": null, "big": 18446744073709551615, "b": true})", "f");
  const JsonFields fields(object, "f");
  CHECK(fields.integer("n", 1, 5) == 5);
  CHECK(fields.number("f", 0, 3) == 2.5);
  CHECK(fields.number("n", 0, 10) == 5.0);
  CHECK(fields.text("s") == "text");
  CHECK(fields.flag("b", false));
  CHECK(json_find(object, "z") == nullptr);
  const auto integer_error = [&](std::string_view key) {
    return error_of([&] { fields.integer(key, 1, 4); });
  };
  CHECK(integer_error("n") == R"(f: "n" is 5; an integer from 1 to 4 is expected)");
  CHECK(integer_error("f") == R"(f: "f" is 2.5; an integer from 1 to 4 is expected)");
  CHECK(integer_error("big") ==
        R"(f: "big" is 18446744073709551615; an integer from 1 to 4 is expected)");
  CHECK(integer_error("b") == R"(f: "b" is true; an integer from 1 to 4 is expected)");
  CHECK(integer_error("z") == R"(f: key "z" is missing)");
  CHECK(error_of([&] { fields.text("n"); }) == R"(f: "n" is 5; a string is expected)");
  CHECK(error_of([&] {
          fields.allow_only({"n", "f", "s", "z", "b"});
        }) == R"(f: key "big" is not known to this version of kvlab)");
}

TEST_CASE("A quoted name stays short and on one line") {
  CHECK(json_quoted("a\nb\x01\"") == R"("a\nb\u0001\"")");
  CHECK(json_quoted("\xff") == R"("\ufffd")");
  CHECK(json_quoted(std::string(1000, 'x')).size() < 100);
}

}  // namespace
}  // namespace kvlab
