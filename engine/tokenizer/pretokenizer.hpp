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

class Normalizer {
 public:
  /// The file's `normalizer`, null or missing included. Throws std::runtime_error for one that is
  /// not NFC, Prepend, Replace (of a string) or a Sequence of them.
  static Normalizer from_file(const Node& file);

  /// `text`, valid UTF-8, normalised: in `result`, or `text` itself where there is nothing to do.
  /// An empty text stays empty.
  std::string_view apply(std::string_view text, std::string& result) const;

 private:
  struct Nfc {};
  struct Prepend {
    std::string text;
  };
  struct Replace {
    std::string from, to;
  };
  using Step = std::variant<Nfc, Prepend, Replace>;
  static Step read_step(const Node& node);
  static std::string run(const Nfc&, std::string_view text);
  static std::string run(const Prepend& step, std::string_view text);
  static std::string run(const Replace& step, std::string_view text);

  std::vector<Step> steps_;
};

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
  /// is not ByteLevel, Split, Digits, Metaspace or a Sequence of them with ByteLevel last.
  static PreTokenizer from_file(const Node& file);

  /// The pieces, in order, none empty. `text` is normalised; `at_start`: it begins the whole text,
  /// which `time` is for. Returns false where `sink` wanted no more.
  bool apply(std::string_view text, bool at_start, const MatchTime& time,
             const PieceSink& sink) const {
    return apply_from(0, text, at_start, time, sink);
  }
  /// Pieces are spelled in the byte-level alphabet.
  bool is_byte_level() const;

 private:
  /// What becomes of a match: a piece of its own, the end of the piece before it, or what alone
  /// stays (Removed, inverted: nothing is lost where the pattern matches every character).
  enum class Behavior { kIsolated, kMergedWithPrevious, kKept };
  struct Split {
    Pattern pattern;
    Behavior behavior = Behavior::kIsolated;
    bool invert = false;  ///< what lies between matches is taken for them
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

  static Step read_step(const Node& node);
  static Split read_split(const Node& node);
  /// By the steps from `step` on.
  bool apply_from(std::size_t step, std::string_view piece, bool at_start, const MatchTime& time,
                  const PieceSink& sink) const;
  // One step; `at_start`: the piece begins the whole text.
  static bool run(const Split& step, std::string_view piece, bool at_start, const MatchTime& time,
                  const PieceSink& sink);
  static bool run(const ByteLevel& step, std::string_view piece, bool at_start,
                  const MatchTime& time, const PieceSink& sink);
  static bool run(const Metaspace& step, std::string_view piece, bool at_start,
                  const MatchTime& time, const PieceSink& sink);

  std::vector<Step> steps_;
};

}  // namespace kvlab::tokenizer
