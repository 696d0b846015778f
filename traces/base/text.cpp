#include "traces/base/text.hpp"

#include <algorithm>

namespace kvlab {
namespace {

/// Bytes of the control character that `text` begins with; 0: it begins with another.
std::size_t control_bytes(std::string_view text) {
  const auto byte = [&](std::size_t i) {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u;
  };
  if (byte(0) < ' ' || byte(0) == 0x7f) return 1;
  if (byte(0) == 0xc2 && byte(1) >= 0x80 && byte(1) <= 0x9f) return 2;        // U+0080 to U+009F
  const bool embeds = byte(1) == 0x80 && byte(2) >= 0xaa && byte(2) <= 0xae,  // U+202A to U+202E
      isolates = byte(1) == 0x81 && byte(2) >= 0xa6 && byte(2) <= 0xa9,       // U+2066 to U+2069
      marks = byte(1) == 0x80 && (byte(2) == 0x8e || byte(2) == 0x8f);        // U+200E, U+200F
  return byte(0) == 0xe2 && (embeds || isolates || marks) ? 3 : 0;
}

}  // namespace

bool has_controls(std::string_view text) {
  for (std::size_t at = 0; at < text.size(); ++at)
    if (control_bytes(text.substr(at)) > 0) return true;
  return false;
}

std::string without_controls(std::string_view text) {
  std::string kept;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t bytes = control_bytes(text.substr(at));
    kept += bytes > 0 ? ' ' : text[at];
    at += std::max<std::size_t>(bytes, 1);
  }
  return kept;
}

std::string printable(std::string_view text) {
  std::string shown;
  char before = 0;  // what the run of controls at hand is shown as
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t bytes = control_bytes(text.substr(at));
    if (bytes == 0) {
      before = 0;
      shown += text[at++];
      continue;
    }
    const char as = text[at] == '\n' || text[at] == '\t' || text[at] == '\r' ? ' ' : '?';
    if (before != as) shown += before = as;
    at += bytes;
  }
  return shown;
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
