// Splits a text into pieces. Merges do not cross the borders of pieces.
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
  /// Reads the file's `normalizer`, which may be null or missing. Throws std::runtime_error unless
  /// it is NFC, Prepend, Replace (of a string) or a Sequence of them.
  static Normalizer from_file(const Node& file);

  /// Normalizes `text`, which is valid UTF-8. Returns a view of `result` or, if nothing changes,
  /// `text` itself. An empty text stays empty.
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

/// When Metaspace adds its mark before a text.
enum class PrependScheme { kAlways, kFirst, kNever };

/// The mark that Metaspace writes in place of a space. Metaspace is both a pre-tokenizer and a
/// decoder.
struct MetaspaceMark {
  std::string replacement;  ///< one character
  PrependScheme scheme;
  static MetaspaceMark read(const Node& node);
};

class PreTokenizer {
 public:
  /// Reads the file's `pre_tokenizer`, which may be null or missing. Throws std::runtime_error
  /// unless it is ByteLevel, Split, Digits, Metaspace or a Sequence of them in which ByteLevel
  /// comes last.
  static PreTokenizer from_file(const Node& file);

  /// Passes the pieces of `text`, which is normalized, to `sink`, in order. No piece is empty.
  /// `at_start`: `text` is the beginning of the whole text. `time`: limit for the whole text. If
  /// `sink` returns false, returns false immediately.
  bool apply(std::string_view text, bool at_start, const MatchTime& time,
             const PieceSink& sink) const {
    return apply_from(0, text, at_start, time, sink);
  }
  /// Whether pieces are written in the byte-level alphabet.
  bool is_byte_level() const;

 private:
  /// What happens to a match. kIsolated: it becomes a piece. kMergedWithPrevious: it becomes the
  /// end of the piece before it. kKept: it becomes a piece, and the text between matches is dropped
  /// (in the file: Removed with invert). No text is dropped if the pattern matches every character.
  enum class Behavior { kIsolated, kMergedWithPrevious, kKept };
  struct Split {
    Pattern pattern;
    Behavior behavior = Behavior::kIsolated;
    bool invert = false;  ///< exchanges the roles of matches and of the text between them
  };
  struct ByteLevel {
    bool add_prefix_space;
    std::optional<Pattern> pattern;  ///< GPT-2's pattern; not set if a Split comes before
  };
  struct Metaspace {
    MetaspaceMark mark;
    bool split;
  };
  using Step = std::variant<Split, ByteLevel, Metaspace>;

  static Step read_step(const Node& node);
  static Split read_split(const Node& node);
  /// Applies the steps from `step` on.
  bool apply_from(std::size_t step, std::string_view piece, bool at_start, const MatchTime& time,
                  const PieceSink& sink) const;
  // Applies one step. `at_start`: the piece begins the whole text.
  static bool run(const Split& step, std::string_view piece, bool at_start, const MatchTime& time,
                  const PieceSink& sink);
  static bool run(const ByteLevel& step, std::string_view piece, bool at_start,
                  const MatchTime& time, const PieceSink& sink);
  static bool run(const Metaspace& step, std::string_view piece, bool at_start,
                  const MatchTime& time, const PieceSink& sink);

  std::vector<Step> steps_;
};

}  // namespace kvlab::tokenizer
