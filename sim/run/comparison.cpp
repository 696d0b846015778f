#include "sim/run/comparison.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iterator>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "policies/catalogue.hpp"
#include "traces/base/text.hpp"

namespace kvlab {

bool holds_no_more(const Memory& own, const Memory& other) {
  return own.mean <= kSameMemory * other.mean && own.peak <= kSameMemory * other.peak;
}

bool Verdict::ties(std::size_t contender) const {
  return std::ranges::find(tied, contender) != tied.end();
}

namespace {

/// Of those that tie with the first: who takes least, the first of the grid in front.
std::vector<std::size_t> preferred(const Verdict& verdict, std::span<const Contender> contenders) {
  std::vector<std::size_t> tied;
  for (std::size_t i = 0; i < verdict.order.size(); ++i)
    if (!verdict.behind[i].behind()) tied.push_back(verdict.order[i]);
  const auto keep = [&](auto wanted) {
    std::vector<std::size_t> kept;
    std::ranges::copy_if(tied, std::back_inserter(kept), wanted);
    if (!kept.empty()) tied = std::move(kept);
  };
  keep([&](std::size_t c) { return !contenders[c].last_resort; });
  const std::size_t least =
      std::ranges::min(tied, {}, [&](std::size_t c) { return contenders[c].memory.mean; });
  keep(
      [&](std::size_t c) { return holds_no_more(contenders[c].memory, contenders[least].memory); });
  std::ranges::sort(tied);
  return tied;
}

/// Those that none dominates, by bytes.
std::vector<std::size_t> frontier_of(std::span<const Contender> contenders,
                                     const DifferenceOf& difference) {
  std::vector<std::size_t> by_error(contenders.size()), frontier;
  std::iota(by_error.begin(), by_error.end(), std::size_t{0});
  std::ranges::stable_sort(by_error, {}, [&](std::size_t c) { return contenders[c].error; });
  for (const std::size_t c : by_error) {
    const bool dominated = std::ranges::any_of(by_error, [&](std::size_t other) {
      return contenders[other].error < contenders[c].error &&
             holds_no_more(contenders[other].memory, contenders[c].memory) &&
             difference(other, c).ahead();
    });
    if (!dominated) frontier.push_back(c);
  }
  std::ranges::stable_sort(frontier, {}, [&](std::size_t c) { return contenders[c].memory.mean; });
  return frontier;
}

}  // namespace

Verdict verdict_of(std::span<const Contender> contenders, double budget_bytes,
                   const DifferenceOf& difference) {
  if (contenders.empty()) throw std::invalid_argument("a verdict: there is nobody to judge");
  Verdict verdict;
  for (std::size_t c = 0; c < contenders.size(); ++c)
    (contenders[c].memory.peak <= kSameMemory * budget_bytes ? verdict.order : verdict.more)
        .push_back(c);
  verdict.over_budget = verdict.order.empty();
  if (verdict.over_budget) std::swap(verdict.order, verdict.more);
  const auto error = [&](std::size_t c) { return contenders[c].error; };
  std::ranges::stable_sort(verdict.order, {}, error);
  std::ranges::stable_sort(verdict.more, {}, error);
  for (const std::size_t c : verdict.order)
    verdict.behind.push_back(c == verdict.order.front() ? Difference{}
                                                        : difference(c, verdict.order.front()));
  verdict.tied = preferred(verdict, contenders);
  verdict.frontier = frontier_of(contenders, difference);
  return verdict;
}

bool guards_fill(std::string_view policy, std::string_view params, std::uint32_t budget_tokens) {
  if (policy == "window" || policy == "sink") return false;  // which is what they are
  double guarded = 0;
  const std::vector<std::string> settings = split_list(params, ':');
  for (const std::string& setting : settings)
    if (setting.starts_with("ladder="))  // which holds other numbers in the same bytes
      budget_tokens = tokens_of(parse_ladder(setting.substr(7)).slots_of_tokens(budget_tokens));
  for (const std::string& setting : settings) {
    const std::size_t equals = setting.find('=') + 1;
    if (!setting.starts_with("sinks=") && !setting.starts_with("recent=")) continue;
    const double number = std::strtod(setting.c_str() + equals, nullptr);
    guarded += setting.ends_with('%') ? std::floor(number * budget_tokens / 100) : number;
  }
  return guarded >= budget_tokens;
}

}  // namespace kvlab
