// Tests of questions: where the answer is, and whether it is unique.
#include "engine/evaluation/task/sample.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <sstream>
#include <stdexcept>

#include "tests/catch.hpp"

namespace kvlab {
namespace {

std::size_t words_in(const std::string& text) {
  std::istringstream in(text);
  std::size_t count = 0;
  for (std::string word; in >> word;) ++count;
  return count;
}

std::size_t count_of(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != text.npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST_CASE("The text has whole sentences, repeats at its end, and hides answers at their depths") {
  const Haystack text("One two. Three \"four!\" Five six seven? Eight");
  REQUIRE(text.sentences() == 4);
  CHECK(text.with(4, 0, {}) == "One two. Three \"four!\"");
  CHECK(text.with(5, 2, {}) == "Five six seven? Eight One two.");
  const std::vector<Hidden> hidden{{1, "z"}, {0, "a"}, {0.5, "m"}, {0.3, "b"}};
  CHECK(text.with(8, 0, hidden) == "a One two. b Three \"four!\" m Five six seven? Eight z");
  CHECK_THROWS_AS(Haystack(" \n"), std::invalid_argument);
}

TEST_CASE("The bundled text has enough words, and no number that could be an answer") {
  CHECK(bundled_haystack().find_first_of("0123456789") == std::string_view::npos);
  CHECK(words_in(std::string(bundled_haystack())) > 1000);
}

TEST_CASE("A pass key is in the text at its depth, and not in the question") {
  const Haystack text(bundled_haystack());
  for (const std::uint32_t words : {50u, 400u, 2500u})
    for (const double depth : {0.0, 0.3, 1.0}) {
      const TaskSample sample = sample_task({}, text, {words, depth}, 1, 0);
      REQUIRE(sample.expected.size() == 1);
      const std::string& key = sample.expected[0];
      CAPTURE(words, depth, key);
      CHECK(key.size() == 5);
      CHECK(count_of(sample.context, key) == 2);
      CHECK((sample.question + sample.lead).find(key) == std::string::npos);
      CHECK(sample.answer() == " " + key);
      const auto before = words_in(sample.context.substr(0, sample.context.find("The pass key")));
      CHECK(std::abs(static_cast<double>(before) - depth * words) <
            45);  // words of one sentence and of the introduction
    }
}

TEST_CASE("Samples are reproducible, and differ by seed, number and depth") {
  const Haystack text(bundled_haystack());
  std::set<std::string> contexts;
  for (const std::uint64_t seed : {0u, 1u})
    for (const std::uint32_t sample : {0u, 1u})
      for (const TaskPoint point : {TaskPoint{60, 0}, TaskPoint{60, 0.5}, TaskPoint{90, 0.5}}) {
        const std::string context = sample_task({}, text, point, seed, sample).context;
        CHECK(context == sample_task({}, text, point, seed, sample).context);
        contexts.insert(context);
      }
  CHECK(contexts.size() == 12);
}

TEST_CASE("Needles: every key has its numbers, and the question asks for all numbers of one key") {
  const Haystack text(bundled_haystack());
  const TaskSpec spec{.kind = TaskKind::needle, .keys = 3, .values = 2};
  const TaskSample sample = sample_task(spec, text, {200, 0.5}, 7, 3);
  CHECK(count_of(sample.context, "One of the secret numbers of the ") == 6);
  REQUIRE(sample.expected.size() == 2);
  const std::string key =
      sample.lead.substr(std::string("The secret numbers of the ").size(),
                         sample.lead.size() - std::string("The secret numbers of the  are").size());
  CHECK(count_of(sample.context, "of the " + key + " is ") == 2);
  std::size_t previous = 0;  // the expected numbers must be in the order of the text
  for (const std::string& number : sample.expected) {
    const std::size_t at = sample.context.find("of the " + key + " is " + number + ".");
    REQUIRE(at != std::string::npos);
    CHECK(at > previous);
    previous = at;
  }
  CHECK(spec.text() == "needle:keys=3:values=2");
  CHECK_THROWS_AS(sample_task({.kind = TaskKind::needle, .keys = 2000}, text, {9, 0}, 0, 0),
                  std::invalid_argument);
}

/// The list in a recall question: the last number of each key, and how many numbers it has.
struct Listed {
  std::map<std::string, std::string> last;
  std::map<std::string, int> count;
  std::vector<std::string> keys;
};
Listed listed(const std::string& context) {
  Listed result;
  std::istringstream in(context.substr(context.find("\n\n") + 2));
  for (std::string line; std::getline(in, line);) {
    const std::string key = line.substr(0, line.find(':'));
    result.last[key] = line.substr(line.find(':') + 2);
    ++result.count[key];
    result.keys.push_back(key);
  }
  return result;
}

TEST_CASE("Recall: the requested key's line is at the depth, and every key occurs once") {
  for (const double depth : {0.0, 0.25, 1.0}) {
    const TaskSample sample =
        sample_task({.kind = TaskKind::recall}, Haystack("a"), {90, depth}, 5, 1);
    const Listed list = listed(sample.context);
    REQUIRE(list.keys.size() == 30);
    CHECK(list.count.size() == 30);
    const std::string key = sample.lead.substr(0, sample.lead.size() - 1);
    CHECK(list.last.at(key) == sample.expected[0]);
    CHECK(list.keys[static_cast<std::size_t>(std::lround(29 * depth))] == key);
  }
}

TEST_CASE("Recall with reassigned keys: the last number counts, and others are reassigned too") {
  for (std::uint32_t number = 0; number < 20; ++number)
    for (const double depth : {0.0, 0.6, 1.0}) {
      const TaskSample sample = sample_task({.kind = TaskKind::recall, .reassigned = true},
                                            Haystack("a"), {90, depth}, 5, number);
      const Listed list = listed(sample.context);
      const std::string key = sample.lead.substr(0, sample.lead.size() - 1);
      CAPTURE(number, depth);
      CHECK(list.last.at(key) == sample.expected[0]);
      CHECK(list.count.at(key) == 2);
      const auto last = std::find(list.keys.rbegin(), list.keys.rend(), key);
      const auto at = list.keys.rend() - last - 1;
      CHECK(at == std::max(1L, std::lround(29 * depth)));
      CHECK(list.count.size() < 28);
    }
}

}  // namespace
}  // namespace kvlab
