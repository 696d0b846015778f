// How a text is cut into the pieces that merges stay within.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "engine/tokenizer/json.hpp"
#include "engine/tokenizer/pattern.hpp"

namespace kvlab::tokenizer {

/// When Metaspace puts its mark before a text.
enum class PrependScheme { kAlways, kFirst, kNever };

/// What Metaspace, which is both a pre-tokenizer and a decoder, writes for a space.
struct MetaspaceMark {
  std::string replacement;  ///< one character
  PrependScheme scheme;
  static MetaspaceMark read(const Node& node);
};

class PreTokenizer {
 public:
  /// The file's `pre_tokenizer`, null or missing included. Throws std::runtime_error for one that
  /// is not ByteLevel, Split (Isolated), Digits, Metaspace or a Sequence of them with ByteLevel
  /// last.
  static PreTokenizer from_file(const Node& file);

  /// The pieces, in order, none empty. `text` is normalised; `at_start`: it begins the whole text,
  /// which `time` is for.
  std::vector<std::string> apply(std::string text, bool at_start, const MatchTime& time) const;
  /// Pieces are spelled in the byte-level alphabet.
  bool is_byte_level() const;

 private:
  struct Split {
    Pattern pattern;
  };
  struct ByteLevel {
    bool add_prefix_space;
    std::optional<Pattern> pattern;  ///< GPT-2's, unless a Split came before
  };
  struct Metaspace {
    MetaspaceMark mark;
    bool split;
  };
  using Step = std::variant<Split, ByteLevel, Metaspace>;
  using Pieces = std::vector<std::string>;

  static Step read_step(const Node& node);
  static Pieces run(const Split& step, const Pieces& pieces, bool at_start, const MatchTime& time);
  static Pieces run(const ByteLevel& step, Pieces pieces, bool at_start, const MatchTime& time);
  static Pieces run(const Metaspace& step, const Pieces& pieces, bool at_start,
                    const MatchTime& time);

  std::vector<Step> steps_;
};

}  // namespace kvlab::tokenizer
