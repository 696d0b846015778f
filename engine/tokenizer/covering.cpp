#include "engine/tokenizer/covering.hpp"

#include <fmt/format.h>

#include <stdexcept>
#include <string>

#include "traces/base/json.hpp"

namespace kvlab {
namespace {

constexpr std::size_t kMostQuoted = 60;

std::string quoted(std::string_view text) {
  return json_quoted(text.size() <= kMostQuoted ? std::string(text)
                                                : std::string(text.substr(0, kMostQuoted)) + "...");
}

/// Where in `whole` the text begins.
std::size_t find_once(std::string_view whole, std::string_view text) {
  const std::size_t found = text.empty() ? whole.npos : whole.find(text);
  if (found == whole.npos)
    throw std::invalid_argument(fmt::format(
        "{} is not in the prompt; a text that is there once is expected", quoted(text)));
  if (whole.find(text, found + 1) != whole.npos)
    throw std::invalid_argument(fmt::format(
        "{} is there more than once; a text that is there once is expected", quoted(text)));
  return found;
}

}  // namespace

TokenRange covering_tokens(const Tokenizer& tokenizer, std::span<const std::int32_t> ids,
                           std::string_view text) {
  const bool special = !ids.empty() && tokenizer.decode(ids.first(1)).empty();
  const std::span<const std::int32_t> rest = ids.subspan(special ? 1 : 0);
  const auto spelled = [&](std::size_t count) {
    return tokenizer.decode(rest.first(count), false).size();
  };
  const std::size_t begin = find_once(tokenizer.decode(rest, false), text);
  /// The least count of tokens that spell so many bytes, by bisection.
  const auto fewest = [&](std::size_t bytes) {
    std::size_t low = 0, high = rest.size();
    while (low < high) {
      const std::size_t middle = (low + high) / 2;
      if (spelled(middle) < bytes)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  };
  const std::size_t first = fewest(begin + 1) - 1, end = fewest(begin + text.size());
  return {static_cast<std::uint32_t>(first + (special ? 1 : 0)),
          static_cast<std::uint32_t>(end - first)};
}

}  // namespace kvlab
