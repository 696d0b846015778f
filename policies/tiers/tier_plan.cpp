#include "policies/tiers/tier_plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
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

KvFormat format_of(std::string_view name, std::string_view text) {
  if (const auto format = find_kv_format(name)) return *format;
  refuse(text,
         fmt::format("'{}' is not a format; known: {}", name.substr(0, kShown), known_formats()));
}

Extent share_of(std::string_view share, std::string_view text) {
  if (!share.ends_with('t') && !share.ends_with('%'))
    refuse(text, fmt::format("'{}' should be tokens such as 16t, or a share such as 25%", share));
  if (share.ends_with('t')) share.remove_suffix(1);
  return parse_extent(share, fmt::format("tiers '{}': share", text), 1);
}

/// Adds the layers of a run such as `4x28`.
void add_layers(TierPlan& tier_plan, std::string_view run, std::string_view text) {
  const std::size_t times = std::min(run.rfind('x'), run.size());
  const std::string_view number = run.substr(std::min(times + 1, run.size()));
  std::size_t count = 0;
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), count);
  if (error != std::errc{} || end != number.data() + number.size() || count < 1 ||
      count > kMaxPlanLayers - tier_plan.layers.size())
    refuse(text, fmt::format("'{}' should be FORMATxLAYERS such as 4x28, with at most {} layers in "
                             "the whole plan",
                             run.substr(0, kShown), kMaxPlanLayers));
  const KvFormat format = format_of(run.substr(0, times), text);
  if (format.kivi)
    refuse(text, fmt::format("{} cannot differ by layer; give it alone", format.name()));
  tier_plan.layers.insert(tier_plan.layers.end(), count, format);
}

TierPlan parse_layers(std::string_view text) {
  TierPlan tier_plan;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find('-', begin), text.size());
    add_layers(tier_plan, text.substr(begin, end - begin), text);
    begin = end + 1;
  }
  tier_plan.tiers = {{tier_plan.layers.front()}};
  return tier_plan;
}

std::string text_of_layers(std::span<const KvFormat> layers) {
  std::string text;
  for (std::size_t begin = 0; begin < layers.size();) {
    std::size_t end = begin;
    while (end < layers.size() && layers[end] == layers[begin]) ++end;
    text += fmt::format("{}{}x{}", begin == 0 ? "" : "-", layers[begin].name(), end - begin);
    begin = end;
  }
  return text;
}

/// Refuses too many tiers before the text is parsed, because parsing each tier takes time.
void refuse_many(std::string_view text) {
  const auto tiers = std::ranges::count_if(text, [](char c) { return c == ',' || c == '+'; }) + 1;
  if (static_cast<std::size_t>(tiers) <= kMaxTiers) return;
  refuse(text, fmt::format("a plan of {} tiers; at most {} are allowed", tiers, kMaxTiers));
}

void check(const TierPlan& tier_plan, std::string_view text) {
  std::uint64_t shares = 0;
  KvFormat above;
  for (const TierPlan::Tier& tier : tier_plan.tiers) {
    if (!tier.format.is_at_most(above))
      refuse(text, fmt::format("{} follows {}, but tiers must be in order of decreasing precision",
                               tier.format.name(), above.name()));
    above = tier.format;
    if (tier.format.kivi && tier_plan.tiers.size() > 1)
      refuse(text, fmt::format(
                       "{} keeps all tokens in its own format; give it alone, without other tiers",
                       tier.format.name()));
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

std::vector<KvFormat> demotion_path(std::span<const TierSlots> tier_plan, int from, int to) {
  std::vector<KvFormat> formats;
  const std::size_t next = from < 0 ? 0 : static_cast<std::size_t>(from) + 1;
  KvFormat above = next == 0 ? KvFormat{} : tier_plan[next - 1].format;
  for (std::size_t r = next; r <= static_cast<std::size_t>(to); ++r) {
    if (tier_plan[r].format != above) formats.push_back(tier_plan[r].format);
    above = tier_plan[r].format;
  }
  return formats;
}

void check_quantized_heads(std::uint32_t head_size) {
  if (head_size % kQuantBlock != 0)
    throw std::invalid_argument(fmt::format(
        "quantized tiers: a head size of {} is not supported; it should be a multiple of {}",
        head_size, kQuantBlock));
}

std::string TierPlan::text(char between, char share_separator) const {
  if (is_by_layer()) return text_of_layers(layers);
  if (tiers.size() == 1) return tiers.front().format.name();
  std::string text;
  for (const Tier& tier : tiers)
    text +=
        fmt::format("{}{}{}{}{}", text.empty() ? "" : std::string(1, between), tier.format.name(),
                    share_separator, text_of(tier.share), tier.share.is_share ? "" : "t");
  return text;
}

std::vector<TierSlots> TierPlan::slots(std::uint64_t bytes, std::uint32_t blocks) const {
  std::uint64_t rest = bytes, left = bytes;
  const auto bytes_of = [&](const Tier& tier) {
    return std::uint64_t{tier.format.block_bytes()} * blocks;
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

std::vector<KvFormat> TierPlan::formats() const {
  std::vector<KvFormat> all = layers;
  if (all.empty())
    for (const Tier& tier : tiers) all.push_back(tier.format);
  return all;
}

std::uint32_t TierPlan::tokens_by_layer(std::uint64_t bytes) const {
  constexpr std::uint64_t kMaxTokens = 0x7fff'ffff;
  std::uint64_t token_bytes = 0;  // bytes of one token in all layers, for one block of channels
  for (const KvFormat& format : layers) token_bytes += format.block_bytes();
  // Limits the bytes, because a cache cannot hold more than kMaxTokens tokens.
  bytes = std::min<std::uint64_t>(bytes, kMaxTokens * KvFormat{}.block_bytes());
  return static_cast<std::uint32_t>(std::min(bytes * layers.size() / token_bytes, kMaxTokens));
}

double TierPlan::mean_bits() const {
  double bits = 0;
  for (const KvFormat& format : layers) bits += format.bits();
  return bits / static_cast<double>(layers.size());
}

std::uint64_t TierPlan::min_token_bytes(std::uint32_t head_size) const {
  std::uint32_t min_bytes = KvFormat{}.block_bytes();
  for (const KvFormat& format : formats()) min_bytes = std::min(min_bytes, format.block_bytes());
  return std::uint64_t{min_bytes} * head_size / kQuantBlock;
}

TierPlan parse_tier_plan(std::string_view text) {
  if (text.find('x') != text.npos) return parse_layers(text);  // no other plan has an x
  refuse_many(text);
  TierPlan tier_plan{.tiers = {}};
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find_first_of(",+", begin), text.size());
    const std::string_view tier = text.substr(begin, end - begin);
    const std::size_t colon = std::min(tier.find_first_of(":@"), tier.size());
    tier_plan.tiers.push_back({format_of(tier.substr(0, colon), text)});
    if (colon < tier.size()) tier_plan.tiers.back().share = share_of(tier.substr(colon + 1), text);
    begin = end + 1;
  }
  check(tier_plan, text);
  return tier_plan;
}

}  // namespace kvlab
