#include "sim/run/overlap.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <unordered_map>

namespace kvlab {
namespace {

constexpr std::size_t kRun = 16;  // number of tokens in a run (of consecutive tokens)

using Ids = std::span<const std::int32_t>;

/// A hash of the run that ends at index `place`: this token and the kRun - 1 tokens before it, or
/// all tokens from the beginning if they are fewer.
std::uint64_t run_at(Ids ids, std::size_t place) {
  const std::size_t first = place + 1 < kRun ? 0 : place + 1 - kRun;
  std::uint64_t hash = place + 1 - first;
  for (const std::int32_t id : ids.subspan(first, place + 1 - first)) {
    hash = (hash ^ static_cast<std::uint32_t>(id)) * 0x9e3779b97f4a7c15;
    hash ^= hash >> 29;
  }
  return hash;
}

/// The runs of the texts added so far, each with the text in which it occurs first.
class Runs {
 public:
  void add(const TextPiece& piece) {
    for (std::size_t i = 0; i < piece.ids.size(); ++i)
      text_of_.try_emplace(run_at(piece.ids, i), piece.text);
  }

  /// Counts the scored tokens of `piece` whose run occurs in an added text. Returns the counts by
  /// text. A token counts for the text in which its run occurs first.
  std::map<std::size_t, std::size_t> count_shared(const TextPiece& piece) const {
    std::map<std::size_t, std::size_t> tokens;
    for (std::size_t i = piece.first_scored; i < piece.ids.size(); ++i)
      if (const auto found = text_of_.find(run_at(piece.ids, i)); found != text_of_.end())
        ++tokens[found->second];
    return tokens;
  }

 private:
  std::unordered_map<std::uint64_t, std::size_t> text_of_;
};

/// [text]: indices of the text's pieces. The longest text comes first.
std::vector<std::vector<std::size_t>> texts_of(std::span<const TextPiece> pieces) {
  std::map<std::size_t, std::vector<std::size_t>> by_text;
  for (std::size_t p = 0; p < pieces.size(); ++p) by_text[pieces[p].text].push_back(p);
  std::vector<std::vector<std::size_t>> texts;
  for (auto& [text, own] : by_text) texts.push_back(std::move(own));
  std::ranges::stable_sort(texts, std::ranges::greater{}, [&](const auto& own) {
    std::size_t tokens = 0;
    for (const std::size_t p : own) tokens += pieces[p].ids.size();
    return tokens;
  });
  return texts;
}

void add_pair(std::vector<Overlaps::Pair>& pairs, const TextPiece& piece, std::size_t other) {
  const auto same = [&](const Overlaps::Pair& pair) {
    return pair.text == piece.text && pair.other == other;
  };
  auto own = std::ranges::find_if(pairs, same);
  if (own == pairs.end()) own = pairs.insert(own, {.text = piece.text, .other = other});
  own->tokens += piece.ids.size() - piece.first_scored;
}

}  // namespace

Overlaps overlaps_of(std::span<const TextPiece> pieces) {
  Overlaps overlaps{.repeats = std::vector<bool>(pieces.size())};
  const auto texts = texts_of(pieces);
  if (texts.size() < 2) return overlaps;
  Runs runs;
  for (const auto& text : texts) {
    for (const std::size_t p : text) {
      const TextPiece& piece = pieces[p];
      const auto shared = runs.count_shared(piece);
      std::size_t tokens = 0;
      for (const auto& [other, count] : shared) tokens += count;
      if (2 * tokens <= piece.ids.size() - piece.first_scored) continue;
      overlaps.repeats[p] = true;
      add_pair(overlaps.pairs, piece, std::ranges::max_element(shared, {}, [](const auto& one) {
                                        return one.second;
                                      })->first);
    }
    for (const std::size_t p : text) runs.add(pieces[p]);
  }
  std::ranges::stable_sort(overlaps.pairs, {}, &Overlaps::Pair::text);
  return overlaps;
}

std::vector<std::string> overlap_warnings(const Overlaps& overlaps,
                                          std::span<const std::string> names) {
  std::vector<std::string> lines;
  for (const Overlaps::Pair& pair : overlaps.pairs)
    lines.push_back(
        fmt::format("{} and {} have text in common; a text counts only once, so {} scored tokens "
                    "of {} are left out",
                    names[pair.other], names[pair.text], pair.tokens, names[pair.text]));
  return lines;
}

}  // namespace kvlab
