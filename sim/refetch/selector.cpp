#include "sim/refetch/selector.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <stdexcept>
#include <vector>

#include "traces/base/text.hpp"

namespace kvlab {
namespace {

constexpr std::uint32_t kMaxSelected = 1u << 20;

[[noreturn]] void refuse(const std::string& text, std::string_view why) {
  throw std::invalid_argument(fmt::format(
      "--refetch: '{}' {}; give top:K (the K most probable tokens), page:P:K (K tokens in "
      "pages of P) or logged (the trace's selections), such as top:64 or page:16:64",
      text, why));
}

std::uint32_t count_in(const std::string& text, const std::string& word) {
  std::uint32_t count = 0;
  const char* const end = word.data() + word.size();
  const auto [stop, error] = std::from_chars(word.data(), end, count);
  if (error != std::errc{} || stop != end || count == 0 || count > kMaxSelected)
    refuse(text,
           fmt::format("has '{}', which should be a number from 1 to {}", word, kMaxSelected));
  return count;
}

}  // namespace

Selector parse_selector(const std::string& text) {
  const std::vector<std::string> words = split_list(text, ':');
  if (text == "logged") return {.kind = Selector::Kind::logged, .tokens = 0, .text = text};
  if (words.size() == 2 && words[0] == "top")
    return {.kind = Selector::Kind::top, .tokens = count_in(text, words[1]), .text = text};
  if (words.size() != 3 || words[0] != "page") refuse(text, "is not a selector");
  const Selector selector{.kind = Selector::Kind::page,
                          .tokens = count_in(text, words[2]),
                          .page = count_in(text, words[1]),
                          .text = text};
  if (selector.tokens % selector.page != 0)
    refuse(text, "would select a part of a page, because K is not a multiple of P");
  return selector;
}

}  // namespace kvlab
