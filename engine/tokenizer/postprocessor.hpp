// The special tokens that a file puts around a text.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/tokenizer/json.hpp"

namespace kvlab::tokenizer {

struct PostProcessor {
  std::vector<std::int32_t> before, after;  ///< ids around those of the text

  /// The file's `post_processor`, null or missing included. Throws std::runtime_error for one that
  /// is not TemplateProcessing, ByteLevel or a Sequence of them.
  static PostProcessor from_file(const Node& file);
};

}  // namespace kvlab::tokenizer
