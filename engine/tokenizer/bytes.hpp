// The byte-level alphabet of GPT-2: every byte as one printable character.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace kvlab::tokenizer {

inline constexpr int kBytes = 256;

/// The character that stands for a byte, as UTF-8.
std::string_view char_of_byte(std::uint8_t byte);
/// Each byte of the text as its character.
std::string bytes_to_chars(std::string_view bytes);
/// The bytes that a token's characters stand for; nothing if one of them stands for none.
std::optional<std::string> chars_to_bytes(std::string_view token);

/// The byte that a token like "<0x0A>" stands for, if it is one.
std::optional<std::uint8_t> byte_of_fallback_token(std::string_view token);
std::string fallback_token(std::uint8_t byte);

}  // namespace kvlab::tokenizer
