#include "engine/loop/task/judge.hpp"

#include <algorithm>
#include <vector>

namespace kvlab {

Judgement judge(std::string_view said, std::span<const std::string> expected, bool ended) {
  constexpr std::string_view kDigits = "0123456789";
  std::vector<std::string_view> missing(expected.begin(), expected.end());
  for (std::size_t at = said.find_first_of(kDigits); !missing.empty();
       at = said.find_first_of(kDigits, at)) {
    if (at == std::string_view::npos) return ended ? Judgement::wrong : Judgement::open;
    const std::size_t end = said.find_first_not_of(kDigits, at);
    const std::string_view number = said.substr(at, end - at);
    if (end == std::string_view::npos && !ended) {  // it may grow
      const bool may_be = std::ranges::any_of(
          missing, [&](std::string_view one) { return one.starts_with(number); });
      return may_be ? Judgement::open : Judgement::wrong;
    }
    const auto found = std::ranges::find(missing, number);
    if (found == missing.end()) return Judgement::wrong;
    missing.erase(found);
    at = end;
  }
  return Judgement::right;
}

}  // namespace kvlab
