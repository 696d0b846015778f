// UTF-8 and the few facts about characters that a tokenizer needs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace kvlab::tokenizer {

// The byte-level alphabet of GPT-2: every byte as one printable character.

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

/// Bytes of the character whose first byte this is. The text around it must be valid UTF-8.
std::size_t char_bytes(char first);
/// The code point that starts at `text[at]`. The text must be valid UTF-8.
char32_t code_point_at(std::string_view text, std::size_t at);
void append_utf8(std::string& text, char32_t code_point);

/// How many bytes of a text are valid UTF-8, up to the first part that is not.
std::size_t valid_bytes(std::string_view bytes);
/// The text as valid UTF-8: every maximal part that cannot begin a character becomes one U+FFFD, as
/// Unicode recommends and Python's errors="replace" does.
std::string replace_invalid_utf8(std::string_view bytes);

/// White_Space of Unicode.
bool is_white_space(char32_t code_point);
/// What regular expressions call a word character: letters, marks, decimal digits, connectors.
bool is_word(char32_t code_point);

/// Unicode normalisation form C of valid UTF-8; n log n at worst.
std::string nfc(std::string_view text);

}  // namespace kvlab::tokenizer
