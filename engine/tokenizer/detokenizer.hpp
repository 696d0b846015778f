// Converts tokens to text.
#pragma once

#include <string>
#include <variant>
#include <vector>

#include "engine/tokenizer/json.hpp"
#include "engine/tokenizer/pretokenizer.hpp"

namespace kvlab::tokenizer {

/// The file's `decoder`. Works like the decoder of the tokenizers library, except that it returns
/// invalid UTF-8 bytes unchanged instead of replacing them by U+FFFD.
class Detokenizer {
 public:
  /// Reads the decoder. Throws std::runtime_error if it is missing or is not ByteLevel, Metaspace,
  /// Replace (of a string), ByteFallback, Fuse, Strip or a Sequence of them.
  static Detokenizer from_file(const Node& file);

  std::string apply(std::vector<std::string> tokens) const;

 private:
  struct ByteLevel {};
  struct ByteFallback {};
  struct Fuse {};
  struct Replace {
    std::string from, to;
  };
  struct Strip {
    std::string content;  ///< one character
    std::size_t start = 0,
                stop = 0;  ///< maximum number to remove at the start and at the end of a token
  };
  using Step = std::variant<ByteLevel, ByteFallback, Fuse, Replace, Strip, MetaspaceMark>;
  using Tokens = std::vector<std::string>;

  static Step read_step(const Node& node);
  static Strip read_strip(const Node& node);
  static Tokens run(const ByteLevel&, Tokens tokens);
  static Tokens run(const ByteFallback&, Tokens tokens);
  static Tokens run(const Fuse&, const Tokens& tokens);
  static Tokens run(const Replace& step, Tokens tokens);
  static Tokens run(const Strip& step, Tokens tokens);
  static Tokens run(const MetaspaceMark& step, Tokens tokens);

  std::vector<Step> steps_;
};

}  // namespace kvlab::tokenizer
