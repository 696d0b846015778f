// The text forms of settings that are the same for all policies: budgets, protected tokens, prefill
// and positions. Also finds the nearest name to a misspelt one. The C library, which has no
// catalogue, links this file too.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <utility>
#include <vector>

#include "policies/catalogue.hpp"
#include "policies/parse_number.hpp"

namespace kvlab {
namespace {

/// Throws unless the number is in [min_value, 2^31). `unit`: what the number counts, for the
/// message.
Extent parse_tokens(std::string_view text, std::string_view what, double min_value,
                    std::string_view alternative = "", std::string_view unit = "tokens") {
  const std::string should = fmt::format("a whole number of {}, at least {} and below 2^31{}", unit,
                                         min_value, alternative);
  const double value = parse_number(text, what, should);
  if (value != std::floor(value) || value < min_value || value >= 2147483648.0) {
    const bool is_fraction = value > 0 && value < 1 && !alternative.empty() && unit == "tokens";
    throw std::invalid_argument(
        fmt::format("{}: '{}' should be {}{}", what, text, should,
                    is_fraction ? fmt::format("; for this share write {:g}%", 100 * value) : ""));
  }
  return tokens(static_cast<std::uint32_t>(value));
}

constexpr std::pair<std::string_view, Budget::Split> kSplits[] = {
    {"pyramid", Budget::Split::pyramid}, {"ada", Budget::Split::ada}};

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i);
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row[b.size()];
}

}  // namespace

std::string text_of(Extent extent) {
  if (!extent.is_share) return fmt::format("{}", extent.tokens);
  return fmt::format("{:g}%", extent.share_ppm / 1e4);
}

Extent parse_extent(std::string_view text, std::string_view what, double min_value) {
  if (!text.ends_with('%')) return parse_tokens(text, what, min_value, ", or a share such as 20%");
  const double value = parse_number(text.substr(0, text.size() - 1), what, "a share such as 20%");
  if (value < 0 || value > 100)
    throw std::invalid_argument(
        fmt::format("{}: {} should be at least 0% and at most 100%", what, text));
  const Extent share{.share_ppm = static_cast<std::uint32_t>(std::lround(value * 1e4)),
                     .is_share = true};
  if (min_value > 0 && share.share_ppm == 0)
    throw std::invalid_argument(fmt::format("{}: {} should be at least 0.0001%", what, text));
  return share;
}

namespace {

/// Parses `128`, `20%`, `20%bytes`, `64KiB` or `ratio(0.5)`.
Budget parse_even(std::string_view text, const std::string& what) {
  if (constexpr std::string_view kRatio = "ratio(";
      text.starts_with(kRatio) && text.ends_with(')')) {
    const std::string_view number = text.substr(kRatio.size(), text.size() - kRatio.size() - 1);
    const double ratio = parse_number(number, what, "the share to evict, such as ratio(0.5)");
    if (!(ratio >= 0 && ratio < 1))
      throw std::invalid_argument(
          fmt::format("{}: {} should be at least ratio(0) and below ratio(1)", what, text));
    const auto share_ppm = static_cast<std::uint32_t>(std::lround(ratio * 1e6));
    return {.extent = {.share_ppm = share_ppm, .is_share = true}, .is_prompt_share = true};
  }
  if (text.ends_with("%bytes"))
    return {.extent = parse_extent(text.substr(0, text.size() - 5), what, 1), .in_bytes = true};
  constexpr std::pair<std::string_view, std::uint64_t> kUnits[] = {
      {"KiB", 1u << 10}, {"MiB", 1u << 20}, {"GiB", 1u << 30}, {"B", 1}};
  for (const auto& [unit, bytes] : kUnits)
    if (text.ends_with(unit)) {
      const std::string_view number = text.substr(0, text.size() - unit.size());
      const Extent count = parse_tokens(number, what, 1, ", such as 64KiB", unit);
      return {.bytes = count.tokens * bytes, .in_bytes = true};
    }
  return {.extent = parse_extent(text, what, 1)};
}

}  // namespace

Budget parse_budget(std::string_view text) {
  if (text == "null")
    throw std::invalid_argument(
        "budget: null is reserved for a later version; give tokens or a share");
  if (text == "all") return {.all = true};
  for (const auto& [name, split] : kSplits) {
    if (!text.starts_with(name) || !text.substr(name.size()).starts_with('(')) continue;
    if (!text.ends_with(')'))
      throw std::invalid_argument(fmt::format("budget: '{}' should end in a )", text));
    const std::string_view mean = text.substr(name.size() + 1, text.size() - name.size() - 2);
    Budget budget = parse_even(mean, fmt::format("budget: {}", name));
    budget.split = split;
    return budget;
  }
  return parse_even(text, "budget");
}

std::uint32_t min_budget(const PolicySpec& spec) {
  const auto fixed = [](Extent protection) { return protection.is_share ? 0u : protection.tokens; };
  return std::max({1u, fixed(spec.sinks) + 1, fixed(spec.sinks) + fixed(spec.recent)});
}

Positions parse_positions(std::string_view text) {
  if (text == "original") return Positions::original;
  if (text == "cache") return Positions::cache;
  throw std::invalid_argument(fmt::format("positions: '{}' should be original or cache", text));
}

std::string_view name_of(Positions positions) {
  return positions == Positions::original ? "original" : "cache";
}

std::string Prefill::text() const {
  if (chunk == 0) return "dense";
  return chunk == 1 ? "stream" : fmt::format("chunk:{}", chunk);
}

Prefill parse_prefill(std::string_view text) {
  if (text == "dense") return {};
  if (text == "stream") return {1};
  if (text.starts_with("chunk:")) return {parse_tokens(text.substr(6), "prefill: chunk", 1).tokens};
  throw std::invalid_argument(fmt::format(
      "prefill: '{}' should be dense, stream or chunk:N (N tokens in each append)", text));
}

std::optional<std::string> nearest_name(std::string_view word,
                                        std::span<const std::string> candidates) {
  std::optional<std::string> best;
  std::size_t best_distance = std::max<std::size_t>(2, word.size() / 3) + 1;
  for (const std::string& candidate : candidates) {
    const std::size_t distance = edit_distance(word, candidate);
    if (distance < best_distance) {
      best = candidate;
      best_distance = distance;
    }
  }
  return best;
}

}  // namespace kvlab
