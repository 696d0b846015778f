#include "engine/loop/text_stream.hpp"

#include <utf8proc.h>

#include <algorithm>

namespace kvlab {
namespace {

constexpr std::size_t kContext = 8, kLongestWindow = 32;  // ids

/// Whether `bytes` (fewer than four) may begin a character: some continuation makes it whole.
bool may_continue(std::string_view bytes) {
  std::string whole(bytes);
  for (const char first : {'\x80', '\x90', '\xa0', '\xbf'}) {
    whole.resize(bytes.size());
    whole.push_back(first);
    while (whole.size() <= 4) {
      std::int32_t code = 0;
      const auto* data = reinterpret_cast<const utf8proc_uint8_t*>(whole.data());
      const auto size = static_cast<utf8proc_ssize_t>(whole.size());
      if (utf8proc_iterate(data, size, &code) == size) return true;
      whole.push_back('\x80');
    }
  }
  return false;
}

}  // namespace

std::string take_utf8(std::string& bytes, bool last) {
  std::string text;
  std::size_t at = 0;
  while (at < bytes.size()) {
    std::int32_t code = 0;
    const auto size = utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(bytes.data()) + at,
                                       static_cast<utf8proc_ssize_t>(bytes.size() - at), &code);
    if (size > 0) {
      text.append(bytes, at, static_cast<std::size_t>(size));
      at += static_cast<std::size_t>(size);
    } else if (!last && bytes.size() - at < 4 && may_continue(std::string_view(bytes).substr(at))) {
      break;
    } else {
      text += "\xef\xbf\xbd";
      ++at;
    }
  }
  bytes.erase(0, at);
  return text;
}

TextStream::TextStream(const Tokenizer& tokenizer, std::span<const std::int32_t> context)
    : tokenizer_(tokenizer), window_(context.begin(), context.end()) {
  shorten(kContext);
}

std::string TextStream::add(std::int32_t id) {
  window_.push_back(id);
  const std::string text = tokenizer_.decode(window_);
  pending_ += text.substr(std::min(known_bytes_, text.size()));
  known_bytes_ = text.size();
  if (window_.size() > kLongestWindow) shorten(kContext);
  return take_utf8(pending_, false);
}

/// Keeps the last `length` ids: decoding the whole text at each token would be quadratic.
void TextStream::shorten(std::size_t length) {
  if (window_.size() > length)
    window_.erase(window_.begin(), window_.end() - static_cast<std::ptrdiff_t>(length));
  known_bytes_ = tokenizer_.decode(window_).size();
}

}  // namespace kvlab
