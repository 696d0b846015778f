// UTF-8, and the properties of characters that a tokenizer needs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace kvlab::tokenizer {

// The byte-level alphabet of GPT-2, in which every byte is one printable character.

inline constexpr int kBytes = 256;

/// The character for a byte, in UTF-8.
std::string_view char_of_byte(std::uint8_t byte);
/// Converts each byte to its character.
std::string bytes_to_chars(std::string_view bytes);
/// Converts a token's characters to bytes. Returns nullopt if a character does not stand for a
/// byte.
std::optional<std::string> chars_to_bytes(std::string_view token);

/// The byte of a token like "<0x0A>". Returns nullopt if the token does not have this form.
std::optional<std::uint8_t> byte_of_fallback_token(std::string_view token);
std::string fallback_token(std::uint8_t byte);

/// Length in bytes of the character that begins with `first`. The text around it must be valid
/// UTF-8.
std::size_t char_bytes(char first);
/// The code point that starts at `text[at]`. The text must be valid UTF-8.
char32_t code_point_at(std::string_view text, std::size_t at);
void append_utf8(std::string& text, char32_t code_point);

/// Length in bytes of the text's longest prefix that is valid UTF-8.
std::size_t valid_bytes(std::string_view bytes);
/// Replaces each maximal invalid part by one U+FFFD, as Unicode recommends and Python's
/// errors="replace" does. An invalid part is an incomplete character or a byte that cannot begin
/// one.
std::string replace_invalid_utf8(std::string_view bytes);

/// Whether a character has Unicode's property White_Space.
bool is_white_space(char32_t code_point);
/// Whether a character is a word character of regular expressions: letter, mark, decimal digit or
/// connector.
bool is_word(char32_t code_point);

/// Unicode normalization form C of valid UTF-8. Takes O(n log n) at worst.
std::string nfc(std::string_view text);

}  // namespace kvlab::tokenizer
