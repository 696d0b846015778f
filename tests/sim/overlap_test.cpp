// Tests that tokens which several texts have in common are counted only once.
#include "sim/run/overlap.hpp"

#include <random>

#include "tests/catch.hpp"

using namespace kvlab;

namespace {

using Ids = std::vector<std::int32_t>;

Ids random_text(std::size_t tokens, unsigned seed) {
  std::mt19937 random(seed);
  Ids ids;
  for (std::size_t i = 0; i < tokens; ++i) ids.push_back(static_cast<std::int32_t>(random() % 500));
  return ids;
}

Ids part(const Ids& ids, std::size_t first, std::size_t tokens) {
  return Ids(ids.begin() + static_cast<std::ptrdiff_t>(first),
             ids.begin() + static_cast<std::ptrdiff_t>(first + tokens));
}

/// Whether each text repeats another one. Each text is one piece, whose second half is scored.
std::vector<bool> repeats(const std::vector<Ids>& texts) {
  std::vector<TextPiece> pieces;
  for (const Ids& ids : texts)
    pieces.push_back({.text = pieces.size(), .ids = ids, .first_scored = ids.size() / 2});
  return overlaps_of(pieces).repeats;
}

}  // namespace

TEST_CASE("An equal text, a text with a few more words and an excerpt count once") {
  const Ids text = random_text(400, 1), other = random_text(400, 2);
  Ids longer = text;
  longer.insert(longer.end(), {1, 2, 3});
  CHECK(repeats({text, other}) == std::vector<bool>{false, false});
  CHECK(repeats({text, other, text}) == std::vector<bool>{false, false, true});
  CHECK(repeats({text, longer}) == std::vector<bool>{true, false});  // the longer text is counted
  CHECK(repeats({longer, text}) == std::vector<bool>{false, true});
  CHECK(repeats({part(text, 37, 120), text}) == std::vector<bool>{true, false});
  CHECK(repeats({{5, 6, 7}, {5, 6, 7}, {5, 6, 8}}) == std::vector<bool>{false, true, false});
}

TEST_CASE("Texts that share only a prompt count as two") {
  const Ids prompt = random_text(200, 1);
  Ids a = prompt, b = prompt;
  for (const std::int32_t id : random_text(200, 2)) a.push_back(id);
  for (const std::int32_t id : random_text(200, 3)) b.push_back(id);
  CHECK(repeats({a, b}) == std::vector<bool>{false, false});
}

TEST_CASE("Windows that two overlapping texts share count once, and both texts are named") {
  const Ids book = random_text(1000, 1);
  const Ids first = part(book, 0, 600), second = part(book, 400, 600);
  std::vector<Ids> windows;
  std::vector<TextPiece> pieces;
  for (const Ids* text : {&first, &second})
    for (std::size_t start = 0; start < 600; start += 100)
      windows.push_back(part(*text, start, 100));
  for (std::size_t w = 0; w < windows.size(); ++w)
    pieces.push_back({.text = w / 6, .ids = windows[w], .first_scored = 50});
  const Overlaps overlaps = overlaps_of(pieces);
  CHECK(std::vector<bool>(overlaps.repeats.begin() + 6, overlaps.repeats.end()) ==
        std::vector<bool>{true, true, false, false, false, false});
  const std::vector<std::string> names{"a.txt", "b.txt"};
  CHECK(overlap_warnings(overlaps, names) ==
        std::vector<std::string>{
            "a.txt and b.txt have text in common; a text counts only once, so 100 "
            "scored tokens of b.txt are left out"});
  // Windows within one text may be equal.
  const std::vector<TextPiece> alike{{.text = 0, .ids = windows[0]},
                                     {.text = 0, .ids = windows[0]}};
  CHECK(overlaps_of(alike).repeats == std::vector<bool>{false, false});
}
