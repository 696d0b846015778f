// Finds texts that repeat one another, such as an excerpt, a copy with a few more words, or a text
// that was captured with another prompt. Tokens that two texts have in common are scored only once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace kvlab {

/// Consecutive tokens of a text: the whole text, or a window of it. Tokens from `first_scored` on
/// are scored.
struct TextPiece {
  std::size_t text;
  std::span<const std::int32_t> ids;
  std::size_t first_scored = 0;
};

/// The pieces that are left out of comparisons, because a longer text (or an earlier text of equal
/// length) also has them.
struct Overlaps {
  std::vector<bool> repeats;  ///< [piece]
  struct Pair {
    std::size_t text, other;   ///< `other` is the text whose tokens are used
    std::uint64_t tokens = 0;  ///< scored tokens of `text` that are left out
  };
  std::vector<Pair> pairs;  ///< by text
};

/// A piece repeats other texts if more than half of its scored tokens also occur in these texts. A
/// token occurs in a text if the text contains the token together with the 15 tokens before it. The
/// first 15 tokens of a piece have fewer tokens before them, so they occur in a text only if a
/// piece of that text begins with the same tokens. `pieces`: the pieces of a text must be
/// contiguous.
Overlaps overlaps_of(std::span<const TextPiece> pieces);

/// One line for each pair: "a.txt and b.txt have text in common; a text counts only once, so 669
/// scored tokens of b.txt are left out".
std::vector<std::string> overlap_warnings(const Overlaps& overlaps,
                                          std::span<const std::string> names);

}  // namespace kvlab
