// A ladder: how the bytes of a cache are shared among rungs, each of one form.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "policies/policy.hpp"
#include "policies/rungs/form.hpp"

namespace kvlab {

/// A rung of one cache.
struct RungSlots {
  const KvForm* form = &kKvForms[0];
  std::uint32_t slots = 0;  ///< tokens that it holds
};

/// Of all rungs, below 2^31.
std::uint32_t tokens_of(std::span<const RungSlots> ladder);

/// The forms of a token that goes from the rung `from`, or -1: as it was computed, down to `to`, in
/// order. Those of equal bits are left out: there it is copied.
std::vector<const KvForm*> way_down(std::span<const RungSlots> ladder, int from, int to);

/// Throws std::invalid_argument where heads of so many channels are no whole blocks.
void check_coded_heads(std::uint32_t head_size);

/// Tiers of one plan. Devices hold fewer: kernels/codes/coded_cache.hpp.
inline constexpr std::size_t kMaxTiers = 16;

struct Ladder {
  struct Rung {
    const KvForm* form = &kKvForms[0];
    Extent share = percent(100);  ///< tokens, whose bytes come first, or a share of the rest

    bool operator==(const Rung&) const = default;
  };
  std::vector<Rung> rungs = {Rung{}};  ///< from the most exact down

  /// Today's rule: all tokens in 16 bit.
  bool is_plain() const { return rungs.size() == 1 && rungs.front().form->exact(); }
  bool is_coded() const { return !rungs.back().form->exact(); }
  bool is_kivi() const { return rungs.back().form->kivi; }
  /// As parse_ladder() reads it; one rung is its form's name.
  std::string text(char between = ',', char of = ':') const;
  /// As it stands behind a policy: `ladder=16@16t+4@100%`.
  std::string setting() const { return "ladder=" + text('+', '@'); }
  /// The slots of each rung in `bytes` of one KV head, whose keys and values have so many blocks of
  /// channels: shares are rounded down, and the last rung has what is left. Throws
  /// std::invalid_argument where the first rung has no room for a token.
  std::vector<RungSlots> slots(std::uint64_t bytes, std::uint32_t blocks) const;
  /// The same in the bytes of so many tokens of 16 bit, whatever a head's size.
  std::vector<RungSlots> slots_of_tokens(std::uint32_t tokens) const {
    return slots(std::uint64_t{tokens} * kKvForms[0].block_bytes(), 1);
  }
  /// Of a token on the tier that takes least.
  std::uint64_t least_token_bytes(std::uint32_t head_size) const;
  bool operator==(const Ladder&) const = default;
};

/// Those that are tried where none is named (docs/guides/precision-tiers.md: what each is for).
inline constexpr const char* kStandardLadders[] = {"16",
                                                   "fp8",
                                                   "8",
                                                   "4",
                                                   "16:16t,8:100%",
                                                   "16:16t,4:100%",
                                                   "16:16t,k4v2:100%",
                                                   "16:16t,4:50%,k4v2:50%",
                                                   "8:25%,4:50%,k4v2:25%"};

/// `16`, `4`, `16:16t,8:25%,4:75%`; behind a policy `16@16t+8@25%+4@75%`. Throws
/// std::invalid_argument: more than kMaxTiers, an unknown form, rungs that go up, shares that are
/// not 100% together. Linear in the text.
Ladder parse_ladder(std::string_view text);

}  // namespace kvlab
