#include "traces/base/text.hpp"

#include <fmt/format.h>

#include <optional>
#include <utility>

namespace kvlab {
namespace {

/// The first character of a text and its length in bytes. There is no character if the bytes are
/// not UTF-8.
struct Front {
  std::size_t bytes;
  std::optional<char32_t> character;

  explicit Front(std::string_view text) : bytes(1) {
    const auto lead = static_cast<unsigned char>(text[0]);
    if (lead < 0x80) character = lead;
    const std::size_t size = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
    if (lead < 0xc2 || lead > 0xf4 || size > text.size()) return;
    char32_t code = lead & (0x7fu >> size);
    for (const char c : text.substr(1, size - 1)) {
      if ((c & 0xc0) != 0x80) return;
      code = code << 6 | (c & 0x3f);
    }
    constexpr char32_t kMin[] = {0x80, 0x800, 0x10000};  // smallest character of 2, 3, 4 bytes
    if (code < kMin[size - 2] || code > 0x10ffff || (code >= 0xd800 && code <= 0xdfff)) return;
    bytes = size;
    character = code;
  }

  bool is_control() const {
    if (!character) return true;
    const char32_t c = *character;
    const auto within = [c](char32_t first, char32_t last) { return c >= first && c <= last; };
    return c < ' ' || within(0x7f, 0x9f) || c == 0x61c || within(0x200e, 0x200f) ||
           within(0x202a, 0x202e) || within(0x2066, 0x2069) || c == 0xfeff;
  }
};

enum class Runs { as_they_are, once };

/// `text` with each control character replaced by `shown_as(character)`; bytes that are not UTF-8
/// count as U+FFFD. With Runs::once, a run of equal replacements is written once.
template <class ShownAs>
std::string replace_controls(std::string_view text, Runs runs, ShownAs&& shown_as) {
  std::string shown, before, as;
  for (; !text.empty(); text.remove_prefix(Front(text).bytes)) {
    const Front front(text);
    before =
        std::exchange(as, front.is_control() ? shown_as(front.character.value_or(0xfffd)) : "");
    if (as.empty())
      shown += text.substr(0, front.bytes);
    else if (runs == Runs::as_they_are || as != before)
      shown += as;
  }
  return shown;
}

}  // namespace

bool has_controls(std::string_view text) {
  for (; !text.empty(); text.remove_prefix(Front(text).bytes))
    if (Front(text).is_control()) return true;
  return false;
}

std::string without_controls(std::string_view text) {
  return replace_controls(text, Runs::as_they_are, [](char32_t) { return std::string(" "); });
}

std::string printable(std::string_view text) {
  return replace_controls(text, Runs::once, [](char32_t c) {
    return std::string(c == '\n' || c == '\t' || c == '\r' ? " " : "?");
  });
}

std::string printable_lines(std::string_view text) {
  return replace_controls(text, Runs::as_they_are, [](char32_t c) {
    return std::string(1, c == '\n' || c == '\t' ? static_cast<char>(c) : '?');
  });
}

std::string printable_json(std::string_view json) {
  return replace_controls(json, Runs::as_they_are, [](char32_t c) {
    return c == '\n' ? std::string("\n") : fmt::format("\\u{:04x}", static_cast<unsigned>(c));
  });
}

std::vector<std::string> split_list(std::string_view text, char separator) {
  std::vector<std::string> parts;
  for (std::size_t start = 0;;) {
    const std::size_t end = text.find(separator, start);
    parts.emplace_back(text.substr(start, end - start));
    if (end == std::string_view::npos) return parts;
    start = end + 1;
  }
}

std::string replace_all(std::string_view text, std::string_view from, std::string_view to) {
  std::size_t hits = 0, at = 0;
  for (std::size_t hit; (hit = text.find(from, at)) != text.npos; at = hit + from.size()) ++hits;
  std::string out;
  out.reserve(text.size() - hits * from.size() + hits * to.size());
  at = 0;
  for (std::size_t hit; (hit = text.find(from, at)) != text.npos; at = hit + from.size()) {
    out += text.substr(at, hit - at);
    out += to;
  }
  out += text.substr(at);
  return out;
}

}  // namespace kvlab
