// A tier plan: how the bytes of a cache are divided among tiers, each of one format.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "policies/policy.hpp"
#include "policies/tiers/format.hpp"

namespace kvlab {

/// One tier of a cache.
struct TierSlots {
  const KvFormat* format = &kKvFormats[0];
  std::uint32_t slots = 0;  ///< capacity in tokens

  bool operator==(const TierSlots&) const = default;
};

/// Number of tokens of all tiers together. It is below 2^31.
std::uint32_t tokens_of(std::span<const TierSlots> tier_plan);

/// The formats through which a token passes when it is demoted from tier `from` (-1: not quantized
/// yet) to tier `to`, in order. Formats of equal precision are left out, because the token is then
/// only copied.
std::vector<const KvFormat*> demotion_path(std::span<const TierSlots> tier_plan, int from, int to);

/// Throws std::invalid_argument unless `head_size` is a multiple of the block size.
void check_quantized_heads(std::uint32_t head_size);

/// Maximum number of tiers in a plan. Devices support fewer: kernels/quantized/quantized_cache.hpp.
inline constexpr std::size_t kMaxTiers = 16;

struct TierPlan {
  struct Tier {
    const KvFormat* format = &kKvFormats[0];
    Extent share = percent(
        100);  ///< a number of tokens, which is allocated first, or a share of the remaining bytes

    bool operator==(const Tier&) const = default;
  };
  std::vector<Tier> tiers = {Tier{}};  ///< in order of decreasing precision

  /// Whether all tokens are kept in 16 bit, the default.
  bool is_plain() const { return tiers.size() == 1 && tiers.front().format->exact(); }
  bool is_quantized() const { return !tiers.back().format->exact(); }
  bool is_kivi() const { return tiers.back().format->kivi; }
  /// The text form that parse_tier_plan() reads; a single tier is written as its format's name.
  std::string text(char between = ',', char of = ':') const;
  /// The setting of a policy: `tiers=16@16t+4@100%`.
  std::string setting() const { return "tiers=" + text('+', '@'); }
  /// The slots of each tier in `bytes` of one KV head with `blocks` blocks of channels. Shares are
  /// rounded down, and the last tier gets the remainder. Throws std::invalid_argument if the first
  /// tier holds no token.
  std::vector<TierSlots> slots(std::uint64_t bytes, std::uint32_t blocks) const;
  /// The slots in the bytes of `tokens` 16-bit tokens; independent of the head size.
  std::vector<TierSlots> slots_of_tokens(std::uint32_t tokens) const {
    return slots(std::uint64_t{tokens} * kKvFormats[0].block_bytes(), 1);
  }
  /// Bytes of a token on the smallest tier.
  std::uint64_t min_token_bytes(std::uint32_t head_size) const;
  bool operator==(const TierPlan&) const = default;
};

/// The plans that are tried by default. docs/guides/precision-tiers.md explains each.
inline constexpr const char* kStandardTierPlans[] = {"16",
                                                     "fp8",
                                                     "8",
                                                     "4",
                                                     "16:16t,8:100%",
                                                     "16:16t,4:100%",
                                                     "16:16t,k4v2:100%",
                                                     "16:16t,4:50%,k4v2:50%",
                                                     "8:25%,4:50%,k4v2:25%"};

/// Parses `16`, `4`, `16:16t,8:25%,4:75%`; in a policy's setting, `16@16t+8@25%+4@75%`. Throws
/// std::invalid_argument for more than kMaxTiers tiers, an unknown format, tiers in order of
/// increasing precision, or shares that do not add up to 100%. Runs in linear time.
TierPlan parse_tier_plan(std::string_view text);

}  // namespace kvlab
