// Which of a text's tokens a part of it lies in.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "engine/tokenizer/tokenizer.hpp"

namespace kvlab {

/// Some of a text's tokens, one behind the other.
struct TokenRange {
  std::uint32_t start, tokens;
};

/// The fewest tokens that cover `text`, where it is once in what `ids` spell, less a special token
/// in front. Throws std::invalid_argument that quotes it where it is not, or more than once.
TokenRange covering_tokens(const Tokenizer& tokenizer, std::span<const std::int32_t> ids,
                           std::string_view text);

}  // namespace kvlab
