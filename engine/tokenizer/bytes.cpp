#include "engine/tokenizer/bytes.hpp"

#include <fmt/format.h>

#include <array>
#include <charconv>

#include "engine/tokenizer/text.hpp"

namespace kvlab::tokenizer {
namespace {

constexpr int kChars = 0x144;  // the last byte character is U+0143

constexpr bool stands_for_itself(int byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

struct ByteMap {
  std::array<std::string, kBytes> chars;
  std::array<std::int16_t, kChars> bytes;  ///< by code point; -1: stands for no byte
};

// Printable bytes keep their Latin-1 character; the others take U+0100 and on, in order.
ByteMap make_byte_map() {
  ByteMap map;
  map.bytes.fill(-1);
  char32_t next = 0x100;
  for (int byte = 0; byte < kBytes; ++byte) {
    const char32_t c = stands_for_itself(byte) ? static_cast<char32_t>(byte) : next++;
    append_utf8(map.chars[byte], c);
    map.bytes[c] = static_cast<std::int16_t>(byte);
  }
  return map;
}

const ByteMap& byte_map() {
  static const ByteMap map = make_byte_map();
  return map;
}

}  // namespace

std::string_view char_of_byte(std::uint8_t byte) { return byte_map().chars[byte]; }

std::string bytes_to_chars(std::string_view bytes) {
  std::string chars;
  chars.reserve(bytes.size() * 2);
  for (const char byte : bytes) chars += char_of_byte(static_cast<std::uint8_t>(byte));
  return chars;
}

std::optional<std::string> chars_to_bytes(std::string_view token) {
  const auto& table = byte_map().bytes;
  std::string bytes;
  bytes.reserve(token.size());
  for (std::size_t at = 0; at < token.size(); at += char_bytes(token[at])) {
    const char32_t c = code_point_at(token, at);
    if (c >= table.size() || table[c] < 0) return std::nullopt;
    bytes += static_cast<char>(table[c]);
  }
  return bytes;
}

std::optional<std::uint8_t> byte_of_fallback_token(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token.back() != '>') return std::nullopt;
  std::uint8_t byte = 0;
  const char *begin = token.data() + 3, *end = begin + 2;
  const auto [stop, error] = std::from_chars(begin, end, byte, 16);
  if (error != std::errc() || stop != end) return std::nullopt;
  return byte;
}

std::string fallback_token(std::uint8_t byte) { return fmt::format("<0x{:02X}>", byte); }

}  // namespace kvlab::tokenizer
