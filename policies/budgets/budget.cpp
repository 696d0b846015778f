// The C library links this file too.
#include "policies/budgets/budget.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

#include "policies/catalogue.hpp"

namespace kvlab {
namespace {

/// Uses the largest exact unit: 65536 is 64KiB.
std::string text_of_bytes(std::uint64_t bytes) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB"};
  std::size_t unit = 0;
  for (; unit + 1 < std::size(units) && bytes % 1024 == 0; bytes /= 1024) ++unit;
  return fmt::format("{}{}", bytes, units[unit]);
}

}  // namespace

std::string Budget::text() const {
  if (all) return "all";
  if (!heads.empty() || !file.empty()) return file.empty() ? "by head" : "@" + file;
  std::string mean = is_prompt_share ? fmt::format("ratio({})", extent.share_ppm / 1e6)
                     : bytes > 0     ? text_of_bytes(bytes)
                                     : text_of(extent) + (in_bytes ? "bytes" : "");
  switch (split) {
    case Split::even:
      break;
    case Split::pyramid:
      return fmt::format("pyramid({})", mean);
    case Split::ada:
      return fmt::format("ada({})", mean);
  }
  return mean;
}

Budget Budget::at_prompt(std::uint32_t prompt) const {
  if (!is_prompt_share) return *this;
  Budget fixed = *this;
  fixed.is_prompt_share = false;
  // Computed in doubles, so that the result equals Python's int(prompt * (1 - ratio)).
  const auto kept = static_cast<std::uint32_t>(prompt * (1.0 - extent.share_ppm / 1e6));
  fixed.extent = tokens(std::max(kept, 1u) + 1);
  return fixed;
}

std::uint64_t Budget::bytes_of(std::uint32_t length, std::uint32_t head_size) const {
  if (head_size == 0)
    throw std::invalid_argument(fmt::format(
        "budget {}: the size of a head is not known here; give tokens or a share", text()));
  if (bytes > 0) return bytes;
  const unsigned __int128 all_bytes =
      static_cast<unsigned __int128>(kv_bytes_per_token(head_size)) * length;
  return static_cast<std::uint64_t>(all_bytes * extent.share_ppm / 1'000'000u);
}

std::uint32_t Budget::resolve(std::uint32_t length, std::uint32_t head_size,
                              std::uint64_t token_bytes) const {
  if (all) return length;
  if (is_prompt_share)
    throw std::invalid_argument(
        fmt::format("budget {}: depends on the length of a prompt, which is not known here; give "
                    "tokens or a share",
                    text()));
  if (!in_bytes) return std::max(1u, extent.resolve(length));
  const std::uint64_t exact = kv_bytes_per_token(head_size),
                      min_budget = token_bytes > 0 ? token_bytes : exact,
                      own = bytes_of(length, head_size);
  if (own < min_budget)
    throw BudgetTooSmall(
        fmt::format(
            "budget {}: is less than one token, which takes {} bytes{}; give at least {}B", text(),
            min_budget,
            min_budget < exact ? fmt::format(" on the cheapest tier ({} in 16 bit)", exact) : "",
            min_budget),
        "");
  return static_cast<std::uint32_t>(std::clamp<std::uint64_t>(own / exact, 1, 0x7fff'ffffu));
}

Budget Budget::at_length(std::uint32_t length, std::uint32_t head_size,
                         std::uint64_t token_bytes) const {
  Budget fixed = *this;
  if (all || is_prompt_share || !(in_bytes || extent.is_share)) return fixed;
  if (in_bytes) fixed.bytes = bytes_of(length, head_size);
  fixed.extent = tokens(resolve(length, head_size, token_bytes));
  return fixed;
}

bool Budget::exempts() const {
  return std::ranges::any_of(heads, [](const auto& layer) { return layer.front() == kNoBudget; });
}

CacheShape CacheShape::policy_layers() const {
  const auto with_window =
      windows.size() - static_cast<std::size_t>(std::ranges::count(windows, 0u));
  return {layers - static_cast<std::uint32_t>(with_window), kv_heads, head_size};
}

std::uint32_t mean_budget(const HeadBudgets& heads) {
  std::uint64_t sum = 0, count = 0;
  for (const auto& layer : heads) {
    if (layer.front() == kNoBudget) continue;
    for (const std::uint32_t own : layer) sum += own;
    count += layer.size();
  }
  return count == 0 ? 0 : static_cast<std::uint32_t>((2 * sum + count) / (2 * count));
}

Budget budget_of_heads(HeadBudgets heads, std::string file) {
  if (heads.empty()) throw std::invalid_argument(" holds no layers");
  for (std::size_t l = 0; l < heads.size(); ++l) {
    if (heads[l].empty() || heads[l].size() != heads.front().size())
      throw std::invalid_argument(
          fmt::format("[{}]: {} numbers; layer 0 has {}, and all layers should have the same", l,
                      heads[l].size(), heads.front().size()));
    if (const auto zero = std::ranges::find(heads[l], 0u); zero != heads[l].end())
      throw std::invalid_argument(fmt::format("[{}][{}]: should be a number of tokens, at least 1",
                                              l, zero - heads[l].begin()));
  }
  const std::uint32_t mean = mean_budget(heads);
  if (mean == 0) throw std::invalid_argument(" exempts every layer; give tokens for at least one");
  return {.extent = tokens(mean), .heads = std::move(heads), .file = std::move(file)};
}

}  // namespace kvlab
