// A tier plan: how the bytes of a cache are divided among tiers. Each tier has one format.
#pragma once

#include <algorithm>
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
  KvFormat format = {};
  std::uint32_t slots = 0;  ///< capacity in tokens

  bool operator==(const TierSlots&) const = default;
};

/// Number of tokens of all tiers together. It is below 2^31.
std::uint32_t tokens_of(std::span<const TierSlots> tier_plan);

/// The formats through which a token passes when it is demoted from tier `from` (-1: not quantized
/// yet) to tier `to`, in order. Equal formats are left out, because the token is then
/// only copied.
std::vector<KvFormat> demotion_path(std::span<const TierSlots> tier_plan, int from, int to);

/// Throws std::invalid_argument unless `head_size` is a multiple of the block size.
void check_quantized_heads(std::uint32_t head_size);

/// Maximum number of tiers in a plan. Devices support fewer (kMaxDeviceTiers).
inline constexpr std::size_t kMaxTiers = 16;

struct TierPlan {
  struct Tier {
    KvFormat format = {};
    Extent share = percent(
        100);  ///< a number of tokens, which is allocated first, or a share of the remaining bytes

    bool operator==(const Tier&) const = default;
  };
  std::vector<Tier> tiers = {Tier{}};  ///< in order of decreasing precision
  /// A plan by layer: a format for each layer without a window, in which the layer keeps all its
  /// tokens. `tiers` then has one tier, with the first layer's format. Empty: every layer has
  /// `tiers`.
  std::vector<KvFormat> layers = {};

  bool is_by_layer() const { return !layers.empty(); }
  /// Whether all tokens are kept in 16 bit, the default.
  bool is_plain() const {
    return !is_by_layer() && tiers.size() == 1 && tiers.front().format.exact();
  }
  /// Whether some tier or some layer is quantized.
  bool is_quantized() const {
    return is_by_layer() ? !std::ranges::all_of(layers, &KvFormat::exact)
                         : !tiers.back().format.exact();
  }
  bool is_kivi() const { return tiers.back().format.kivi; }
  /// The formats of all tiers or layers.
  std::vector<KvFormat> formats() const;
  /// The mean bits per element of formats by layer, with scales and minima.
  double mean_bits() const;
  /// The text form that parse_tier_plan() reads. A single tier is written as its format's name, and
  /// formats by layer as runs of equal layers, such as `8x2-4x28`.
  std::string text(char between = ',', char share_separator = ':') const;
  /// The setting of a policy: `tiers=16@16t+4@100%`.
  std::string setting() const { return "tiers=" + text('+', '@'); }
  /// The slots of each tier, for a KV head with `bytes` bytes and `blocks` blocks of channels.
  /// Shares are rounded down, and the last tier gets the remainder. Throws std::invalid_argument if
  /// the first tier holds no token.
  std::vector<TierSlots> slots(std::uint64_t bytes, std::uint32_t blocks) const;
  /// The slots of each tier, for the bytes of `tokens` 16-bit tokens. They do not depend on the
  /// head size.
  std::vector<TierSlots> slots_of_tokens(std::uint32_t tokens) const {
    return slots(std::uint64_t{tokens} * KvFormat{}.block_bytes(), 1);
  }
  /// With formats by layer: the number of tokens that every layer holds. `bytes` is the mean number
  /// of bytes that a layer has for one block of channels of all its tokens. It is below 2^31.
  std::uint32_t tokens_by_layer(std::uint64_t bytes) const;
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

/// Maximum number of layers in a plan by layer.
inline constexpr std::size_t kMaxPlanLayers = 1024;

/// Parses `16`, `4`, `16:16t,8:25%,4:75%`; in a policy's setting, `16@16t+8@25%+4@75%`; and formats
/// by layer, `8x2-4x28`. Throws std::invalid_argument for more than kMaxTiers tiers or
/// kMaxPlanLayers layers, an unknown format, tiers in order of increasing precision, or shares that
/// do not add up to 100%. Runs in linear time.
TierPlan parse_tier_plan(std::string_view text);

}  // namespace kvlab
