#include "policies/tiers/tier_plan.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <stdexcept>

#include "policies/budgets/budget.hpp"
#include "policies/catalogue.hpp"

namespace kvlab {
namespace {

constexpr std::uint32_t kWhole = 1'000'000;  // 100% in parts per million
constexpr std::size_t kShown = 60;           // maximum bytes of the user's text in a message

[[noreturn]] void refuse(std::string_view text, const std::string& why) {
  throw std::invalid_argument(fmt::format("tiers '{}{}': {}", text.substr(0, kShown),
                                          text.size() > kShown ? "..." : "", why));
}

const KvFormat& find_form(std::string_view name, std::string_view text) {
  const auto* const format = std::ranges::find(kKvFormats, name, &KvFormat::name);
  if (format != std::end(kKvFormats)) return *format;
  std::vector<std::string_view> known;
  for (const KvFormat& one : kKvFormats) known.push_back(one.name);
  refuse(text, fmt::format("'{}' is not a format; known: {}", name, fmt::join(known, ", ")));
}

Extent share_of(std::string_view share, std::string_view text) {
  if (!share.ends_with('t') && !share.ends_with('%'))
    refuse(text, fmt::format("'{}' should be tokens such as 16t, or a share such as 25%", share));
  if (share.ends_with('t')) share.remove_suffix(1);
  return parse_extent(share, fmt::format("tiers '{}': share", text), 1);
}

/// Refuses too many tiers before the text is parsed, because parsing each tier takes time.
void refuse_many(std::string_view text) {
  const auto tiers = std::ranges::count_if(text, [](char c) { return c == ',' || c == '+'; }) + 1;
  if (static_cast<std::size_t>(tiers) <= kMaxTiers) return;
  refuse(text, fmt::format("a plan of {} tiers; at most {} are allowed", tiers, kMaxTiers));
}

void check(const TierPlan& tier_plan, std::string_view text) {
  std::uint64_t shares = 0;
  const KvFormat* above = kKvFormats;
  for (const TierPlan::Tier& tier : tier_plan.tiers) {
    if (tier.format < above)
      refuse(text, fmt::format("{} under {}: tiers must be in order of decreasing precision",
                               tier.format->name, above->name));
    above = tier.format;
    if (tier.format->kivi && tier_plan.tiers.size() > 1)
      refuse(text, fmt::format(
                       "{} keeps all tokens in its own format; give it alone, without other tiers",
                       tier.format->name));
    if (tier.share.is_share) shares += tier.share.share_ppm;
  }
  if (shares != kWhole)
    refuse(text, fmt::format("shares add up to {:g}%; 100% is expected",
                             static_cast<double>(shares) / 1e4));
}

}  // namespace

std::uint32_t tokens_of(std::span<const TierSlots> tier_plan) {
  std::uint64_t tokens = 0;
  for (const TierSlots& tier : tier_plan) tokens += tier.slots;
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(tokens, 0x7fff'ffffu));
}

std::vector<const KvFormat*> demotion_path(std::span<const TierSlots> tier_plan, int from, int to) {
  std::vector<const KvFormat*> formats;
  const std::size_t next = from < 0 ? 0 : static_cast<std::size_t>(from) + 1;
  const KvFormat* above = next == 0 ? &kKvFormats[0] : tier_plan[next - 1].format;
  for (std::size_t r = next; r <= static_cast<std::size_t>(to); ++r) {
    if (*tier_plan[r].format != *above) formats.push_back(tier_plan[r].format);
    above = tier_plan[r].format;
  }
  return formats;
}

void check_quantized_heads(std::uint32_t head_size) {
  if (head_size % kQuantBlock != 0)
    throw std::invalid_argument(
        fmt::format("quantized tiers: heads of {} channels; whole blocks of {} are expected",
                    head_size, kQuantBlock));
}

std::string TierPlan::text(char between, char of) const {
  if (tiers.size() == 1) return std::string(tiers.front().format->name);
  std::string text;
  for (const Tier& tier : tiers)
    text += fmt::format("{}{}{}{}{}", text.empty() ? "" : std::string(1, between),
                        tier.format->name, of, text_of(tier.share), tier.share.is_share ? "" : "t");
  return text;
}

std::vector<TierSlots> TierPlan::slots(std::uint64_t bytes, std::uint32_t blocks) const {
  std::uint64_t rest = bytes, left = bytes;
  const auto bytes_of = [&](const Tier& tier) {
    return std::uint64_t{tier.format->block_bytes()} * blocks;
  };
  for (const Tier& tier : tiers)
    if (!tier.share.is_share) rest -= std::min(rest, tier.share.tokens * bytes_of(tier));
  std::vector<TierSlots> slots;
  for (const Tier& tier : tiers) {
    std::uint64_t own = left;
    if (!tier.share.is_share)
      own = std::min(left, tier.share.tokens * bytes_of(tier));
    else if (&tier != &tiers.back())
      own = static_cast<std::uint64_t>(static_cast<unsigned __int128>(rest) * tier.share.share_ppm /
                                       kWhole);
    const std::uint64_t count = std::min<std::uint64_t>(own / bytes_of(tier), 0x7fff'ffffu);
    slots.push_back({tier.format, static_cast<std::uint32_t>(count)});
    left -= count * bytes_of(tier);
  }
  if (slots.front().slots == 0)
    throw BudgetTooSmall(
        fmt::format(
            "tiers {}: {} bytes are too few for one token on its first tier, which takes {}",
            text(), bytes, bytes_of(tiers.front())),
        "");
  return slots;
}

std::uint64_t TierPlan::min_token_bytes(std::uint32_t head_size) const {
  std::uint32_t least = kKvFormats[0].block_bytes();
  for (const Tier& tier : tiers) least = std::min(least, tier.format->block_bytes());
  return std::uint64_t{least} * head_size / kQuantBlock;
}

TierPlan parse_tier_plan(std::string_view text) {
  refuse_many(text);
  TierPlan tier_plan{.tiers = {}};
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find_first_of(",+", begin), text.size());
    const std::string_view tier = text.substr(begin, end - begin);
    const std::size_t colon = std::min(tier.find_first_of(":@"), tier.size());
    tier_plan.tiers.push_back({&find_form(tier.substr(0, colon), text)});
    if (colon < tier.size()) tier_plan.tiers.back().share = share_of(tier.substr(colon + 1), text);
    begin = end + 1;
  }
  check(tier_plan, text);
  return tier_plan;
}

}  // namespace kvlab
