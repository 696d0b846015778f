// A long text by sentences, and what is hidden in it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvlab {

/// Text without digits, written for kvlab.
std::string_view bundled_haystack();

/// A sentence that is put into a text behind `depth` of its words.
struct Hidden {
  double depth;  ///< 0 … 1
  std::string sentence;
};

class Haystack {
 public:
  /// Throws std::invalid_argument for a text without words.
  explicit Haystack(std::string_view text);

  std::size_t sentences() const { return sentences_.size(); }
  /// Whole sentences from the `start`-th on, beginning again behind the last one, until there are
  /// `words` words; between them what is hidden, each at the border nearest to its depth. At one
  /// border, in the order given.
  std::string with(std::uint32_t words, std::size_t start, std::span<const Hidden> hidden) const;

 private:
  struct Sentence {
    std::string text;
    std::uint32_t words;
  };
  std::vector<Sentence> sentences_;
};

}  // namespace kvlab
