// What is done to a text before anything else: Unicode normalisation, SentencePiece's marks for
// spaces.
#pragma once

#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "engine/tokenizer/json.hpp"

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

}  // namespace kvlab::tokenizer
