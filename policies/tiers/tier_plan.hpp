// A tier plan: how the bytes of a cache are shared among tiers, each of one format.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "policies/policy.hpp"
#include "policies/tiers/format.hpp"

namespace kvlab {

/// A tier of one cache.
struct TierSlots {
  const KvFormat* format = &kKvFormats[0];
  std::uint32_t slots = 0;  ///< tokens that it holds
};

/// Of all tiers, below 2^31.
std::uint32_t tokens_of(std::span<const TierSlots> tier_plan);

/// The formats of a token that goes from the tier `from`, or -1: as it was computed, down to `to`,
/// in order. Those of equal bits are left out: there it is copied.
std::vector<const KvFormat*> demotion_path(std::span<const TierSlots> tier_plan, int from, int to);

/// Throws std::invalid_argument where heads of so many channels are no whole blocks.
void check_quantized_heads(std::uint32_t head_size);

/// Tiers of one plan. Devices hold fewer: kernels/quantized/quantized_cache.hpp.
inline constexpr std::size_t kMaxTiers = 16;

struct TierPlan {
  struct Tier {
    const KvFormat* format = &kKvFormats[0];
    Extent share = percent(100);  ///< tokens, whose bytes come first, or a share of the rest

    bool operator==(const Tier&) const = default;
  };
  std::vector<Tier> tiers = {Tier{}};  ///< from the most exact down

  /// Today's rule: all tokens in 16 bit.
  bool is_plain() const { return tiers.size() == 1 && tiers.front().format->exact(); }
  bool is_quantized() const { return !tiers.back().format->exact(); }
  bool is_kivi() const { return tiers.back().format->kivi; }
  /// As parse_tier_plan() reads it; one tier is its format's name.
  std::string text(char between = ',', char of = ':') const;
  /// As it stands behind a policy: `tiers=16@16t+4@100%`.
  std::string setting() const { return "tiers=" + text('+', '@'); }
  /// The slots of each tier in `bytes` of one KV head, whose keys and values have so many blocks of
  /// channels: shares are rounded down, and the last tier has what is left. Throws
  /// std::invalid_argument where the first tier holds no token.
  std::vector<TierSlots> slots(std::uint64_t bytes, std::uint32_t blocks) const;
  /// The same in the bytes of so many tokens of 16 bit, whatever a head's size.
  std::vector<TierSlots> slots_of_tokens(std::uint32_t tokens) const {
    return slots(std::uint64_t{tokens} * kKvFormats[0].block_bytes(), 1);
  }
  /// Of a token on the tier that takes least.
  std::uint64_t min_token_bytes(std::uint32_t head_size) const;
  bool operator==(const TierPlan&) const = default;
};

/// Those that are tried where none is named (docs/guides/precision-tiers.md: what each is for).
inline constexpr const char* kStandardTierPlans[] = {"16",
                                                     "fp8",
                                                     "8",
                                                     "4",
                                                     "16:16t,8:100%",
                                                     "16:16t,4:100%",
                                                     "16:16t,k4v2:100%",
                                                     "16:16t,4:50%,k4v2:50%",
                                                     "8:25%,4:50%,k4v2:25%"};

/// `16`, `4`, `16:16t,8:25%,4:75%`; behind a policy `16@16t+8@25%+4@75%`. Throws
/// std::invalid_argument: more than kMaxTiers, an unknown format, tiers in order of increasing
/// precision, shares that are not 100% together. Linear in the text.
TierPlan parse_tier_plan(std::string_view text);

}  // namespace kvlab
