// Text as its tokens come: whole UTF-8 characters only.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/tokenizer/tokenizer.hpp"

namespace kvlab {

/// Takes from the front of `bytes` all that is settled, as valid UTF-8: bytes that cannot be part
/// of a character become U+FFFD; a character that may still be completed stays, unless `last`.
std::string take_utf8(std::string& bytes, bool last);

class TextStream {
 public:
  /// `context`: the ids before the first one, which may decide about its leading space.
  TextStream(const Tokenizer& tokenizer, std::span<const std::int32_t> context);

  /// The text that `id` completes; special tokens have none.
  std::string add(std::int32_t id);
  /// What is left, made valid.
  std::string finish() { return take_utf8(pending_, true); }

 private:
  void shorten(std::size_t length);

  const Tokenizer& tokenizer_;
  std::vector<std::int32_t> window_;  // the last ids
  std::size_t known_bytes_ = 0;       // of the window's text, those of ids added before
  std::string pending_;
};

}  // namespace kvlab
