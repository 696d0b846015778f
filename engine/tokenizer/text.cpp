#include "engine/tokenizer/text.hpp"

#include <fmt/format.h>
#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace kvlab::tokenizer {
namespace {

constexpr int kChars = 0x144;  // the last character of the alphabet is U+0143

constexpr bool is_printable_byte(int byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

struct ByteMap {
  std::array<std::string, kBytes> chars;
  std::array<std::int16_t, kChars> bytes;  ///< by code point; -1: the character stands for no byte
};

// Printable bytes keep their Latin-1 character. The other bytes become U+0100 and the following
// characters, in order.
ByteMap make_byte_map() {
  ByteMap map;
  map.bytes.fill(-1);
  char32_t next = 0x100;
  for (int byte = 0; byte < kBytes; ++byte) {
    const char32_t c = is_printable_byte(byte) ? static_cast<char32_t>(byte) : next++;
    append_utf8(map.chars[byte], c);
    map.bytes[c] = static_cast<std::int16_t>(byte);
  }
  return map;
}

const ByteMap& byte_map() {
  static const ByteMap map = make_byte_map();
  return map;
}

bool is_ascii(char c) { return static_cast<unsigned char>(c) < 0x80; }

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

struct Lead {
  std::size_t bytes = 0;  ///< bytes of the whole character; 0: the byte cannot begin one
  std::uint8_t low = 0x80, high = 0xBF;  ///< range of the second byte
};

// Table 3-7 of the Unicode standard: well-formed UTF-8.
Lead lead_of(std::uint8_t byte) {
  if (byte < 0x80) return {1};
  if (byte < 0xC2) return {0};
  if (byte < 0xE0) return {2};
  if (byte == 0xE0) return {3, 0xA0, 0xBF};
  if (byte == 0xED) return {3, 0x80, 0x9F};
  if (byte < 0xF0) return {3};
  if (byte == 0xF0) return {4, 0x90, 0xBF};
  if (byte < 0xF4) return {4};
  if (byte == 0xF4) return {4, 0x80, 0x8F};
  return {0};
}

struct Part {
  std::size_t bytes;
  bool valid;
};

// The character at `at` or, if the bytes there are invalid, the longest invalid part.
Part part_at(std::string_view text, std::size_t at) {
  const Lead lead = lead_of(static_cast<std::uint8_t>(text[at]));
  if (lead.bytes == 0) return {1, false};
  for (std::size_t i = 1; i < lead.bytes; ++i) {
    if (at + i == text.size()) return {i, false};
    const auto byte = static_cast<std::uint8_t>(text[at + i]);
    const std::uint8_t low = i == 1 ? lead.low : 0x80, high = i == 1 ? lead.high : 0xBF;
    if (byte < low || byte > high) return {i, false};
  }
  return {lead.bytes, true};
}

struct Decomposed {
  utf8proc_int32_t code_point;
  utf8proc_int16_t combining_class;
};

void append_decomposed(char32_t code_point, std::vector<Decomposed>& out) {
  std::array<utf8proc_int32_t, 32> parts;  // the longest canonical decomposition has 4
  int last_boundary = 0;
  const auto count =
      utf8proc_decompose_char(static_cast<utf8proc_int32_t>(code_point), parts.data(), parts.size(),
                              UTF8PROC_DECOMPOSE, &last_boundary);
  if (count < 0 || count > static_cast<utf8proc_ssize_t>(parts.size())) {
    throw std::runtime_error("a character cannot be decomposed");
  }
  for (utf8proc_ssize_t i = 0; i < count; ++i) {
    out.push_back({parts[i], utf8proc_get_property(parts[i])->combining_class});
  }
}

// Sorts each run of combining marks by class, which is the canonical order. (utf8proc's own
// ordering takes quadratic time.)
void order_marks(std::vector<Decomposed>& chars) {
  const auto is_starter = [](const Decomposed& c) { return c.combining_class == 0; };
  for (auto begin = chars.begin(); begin != chars.end();) {
    begin = std::find_if_not(begin, chars.end(), is_starter);
    const auto end = std::find_if(begin, chars.end(), is_starter);
    std::stable_sort(begin, end, [](const Decomposed& a, const Decomposed& b) {
      return a.combining_class < b.combining_class;
    });
    begin = end;
  }
}

void append_nfc(std::string_view text, std::string& out) {
  if (std::all_of(text.begin(), text.end(), is_ascii)) {
    out += text;
    return;
  }
  std::vector<Decomposed> chars;
  chars.reserve(text.size());
  for (std::size_t at = 0; at < text.size(); at += char_bytes(text[at])) {
    append_decomposed(code_point_at(text, at), chars);
  }
  order_marks(chars);

  std::vector<utf8proc_int32_t> points(chars.size() + 1);
  std::transform(chars.begin(), chars.end(), points.begin(),
                 [](const Decomposed& c) { return c.code_point; });
  const auto options = static_cast<utf8proc_option_t>(UTF8PROC_COMPOSE | UTF8PROC_STABLE);
  const auto count =
      utf8proc_normalize_utf32(points.data(), static_cast<utf8proc_ssize_t>(chars.size()), options);
  if (count < 0) throw std::runtime_error("the text cannot be normalized");
  for (utf8proc_ssize_t i = 0; i < count; ++i) append_utf8(out, static_cast<char32_t>(points[i]));
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

std::size_t char_bytes(char first) { return lead_of(static_cast<std::uint8_t>(first)).bytes; }

char32_t code_point_at(std::string_view text, std::size_t at) {
  const std::size_t bytes = char_bytes(text[at]);
  const auto first = static_cast<std::uint8_t>(text[at]);
  if (bytes == 1) return first;
  char32_t value = first & (0xFFu >> (bytes + 1));
  for (std::size_t i = 1; i < bytes; ++i) {
    value = value << 6 | (static_cast<std::uint8_t>(text[at + i]) & 0x3Fu);
  }
  return value;
}

void append_utf8(std::string& text, char32_t c) {
  const auto tail = [&](int shift) { text += static_cast<char>(0x80 | ((c >> shift) & 0x3F)); };
  if (c < 0x80) {
    text += static_cast<char>(c);
  } else if (c < 0x800) {
    text += static_cast<char>(0xC0 | c >> 6);
    tail(0);
  } else if (c < 0x10000) {
    text += static_cast<char>(0xE0 | c >> 12);
    tail(6), tail(0);
  } else {
    text += static_cast<char>(0xF0 | c >> 18);
    tail(12), tail(6), tail(0);
  }
}

std::size_t valid_bytes(std::string_view bytes) {
  std::size_t at = 0;
  for (Part part{}; at < bytes.size(); at += part.bytes) {
    part = part_at(bytes, at);
    if (!part.valid) break;
  }
  return at;
}

std::string replace_invalid_utf8(std::string_view bytes) {
  std::size_t size = 0;
  for (std::size_t at = 0; at < bytes.size();) {
    const Part part = part_at(bytes, at);
    size += part.valid ? part.bytes : kReplacement.size();
    at += part.bytes;
  }
  std::string text;
  text.reserve(size);
  for (std::size_t at = 0; at < bytes.size();) {
    const Part part = part_at(bytes, at);
    text += part.valid ? bytes.substr(at, part.bytes) : kReplacement;
    at += part.bytes;
  }
  return text;
}

bool is_white_space(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

bool is_word(char32_t c) {
  if (c == 0x200C || c == 0x200D) return true;  // Join_Control
  // Circled and squared Latin letters have the category of symbols, but are alphabetic.
  if ((c >= 0x24B6 && c <= 0x24E9) || (c >= 0x1F130 && c <= 0x1F149) ||
      (c >= 0x1F150 && c <= 0x1F169) || (c >= 0x1F170 && c <= 0x1F189)) {
    return true;
  }
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default:
      return false;
  }
}

// Works in blocks, because code points need several times the memory of the bytes. Each later block
// begins at an ASCII character, because an ASCII character never composes with what precedes it.
std::string nfc(std::string_view text) {
  constexpr std::size_t kNfcBytes = 64 * 1024;
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    std::size_t end = std::min(kNfcBytes, text.size());
    while (end < text.size() && !is_ascii(text[end])) ++end;
    append_nfc(text.substr(0, end), out);
    text.remove_prefix(end);
  }
  return out;
}

}  // namespace kvlab::tokenizer
