#include "engine/loop/task/haystack.hpp"

#include <cmath>
#include <sstream>
#include <stdexcept>

namespace kvlab {
namespace {

/// Whether a word ends a sentence: a full stop, perhaps in quotes or brackets.
bool ends_sentence(std::string_view word) {
  while (!word.empty() && (word.back() == '"' || word.back() == '\'' || word.back() == ')'))
    word.remove_suffix(1);
  return !word.empty() && (word.back() == '.' || word.back() == '!' || word.back() == '?');
}

void append(std::string& text, std::string_view sentence) {
  if (!text.empty()) text += ' ';
  text += sentence;
}

}  // namespace

Haystack::Haystack(std::string_view text) {
  constexpr std::uint32_t kMostWords = 60;  // of a sentence: texts without full stops are cut
  std::istringstream in{std::string(text)};
  Sentence sentence{"", 0};
  for (std::string word; in >> word;) {
    append(sentence.text, word);
    if (++sentence.words < kMostWords && !ends_sentence(word)) continue;
    sentences_.push_back(std::move(sentence));
    sentence = {"", 0};
  }
  if (sentence.words > 0) sentences_.push_back(std::move(sentence));
  if (sentences_.empty())
    throw std::invalid_argument("--text: has no words; a text of some sentences is needed");
}

std::string Haystack::with(std::uint32_t words, std::size_t start,
                           std::span<const Hidden> hidden) const {
  std::vector<const Sentence*> taken;
  std::vector<double> words_before{0};  // of each border
  while (words_before.back() < words) {
    taken.push_back(&sentences_[(start + taken.size()) % sentences_.size()]);
    words_before.push_back(words_before.back() + taken.back()->words);
  }
  std::vector<std::string> at_border(words_before.size());
  for (const Hidden& one : hidden) {
    const double wanted = one.depth * words_before.back();
    std::size_t nearest = 0;
    for (std::size_t b = 1; b < words_before.size(); ++b)
      if (std::abs(words_before[b] - wanted) < std::abs(words_before[nearest] - wanted))
        nearest = b;
    append(at_border[nearest], one.sentence);
  }
  std::string text = at_border[0];
  for (std::size_t i = 0; i < taken.size(); ++i) {
    append(text, taken[i]->text);
    if (!at_border[i + 1].empty()) append(text, at_border[i + 1]);
  }
  return text;
}

}  // namespace kvlab
