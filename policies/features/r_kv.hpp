// r_kv: keeps important tokens and evicts redundant ones. Evicts the token with the lowest `mix` *
// attention - (1 - mix) * redundancy.
//
// Cai et al. 2025, "R-KV: Redundancy-aware KV Cache Compression for Reasoning Models", section 3.
// The feature `redundancy` is the softmax, over tokens, of a key's mean cosine with the others.
// Deliberate differences:
//   - the paper averages the attention of the last 8 queries and takes the maximum of 7 neighbours;
//     here each query has 7/8 of the weight of the next query, so the weights sum to 8, and
//     neighbours are ignored;
//   - redundancy is over every key up to the end of the token's append, including evicted ones,
//     and is not updated later; the paper recomputes it over the live keys, and exempts the latest
//     tenth of similar keys;
//   - the paper evicts to the budget in bursts of 128 tokens;
//   - attention is summed over the group.
#pragma once

#include "policies/policy.hpp"

namespace kvlab {

struct RKV {
  static constexpr PolicyInfo kInfo{
      .name = "r_kv",
      .summary =
          "evicts the token with the lowest score: recent attention minus redundancy of the key",
      .citation = "Cai et al. 2025, R-KV, section 3 (arXiv:2505.24133)",
      .needs = Needs::mass,
      .weighted = true,
      .recent = tokens(1),
      .features = {"redundancy"}};
  struct Params {
    double mix;
  };
  static constexpr Param<Params> kParams[]{
      {"mix", "share of attention in the score (lambda)", &Params::mix, 0.1, 0, 1}};
  struct Slot {
    std::uint64_t mass;  // Q32.32; each query multiplies the earlier mass by 7/8
  };

  static constexpr std::uint32_t kForgotten = 128;  // (7/8)^128 < 2^-24

  static constexpr void append(Slot& slot, Token, const Params&, const Step&) { slot.mass = 0; }
  static constexpr void observe(Slot& slot, const Observation& seen, const Params&,
                                const Step& step) {
    for (std::uint32_t q = 0; q < step.queries && q < kForgotten; ++q) slot.mass -= slot.mass / 8;
    if (step.queries >= kForgotten) slot.mass = 0;
    slot.mass += seen.mass;
  }
  static constexpr double rank(const Slot& slot, Token token, const Params& params, const Step&) {
    const double attention = static_cast<double>(slot.mass) * (0x1p-32 / 8);
    return params.mix * attention - (1 - params.mix) * static_cast<double>(token.feature[0]);
  }
  static constexpr float weight(std::uint32_t age, const Params&) {
    float weight = 1;
    for (std::uint32_t a = 0; a < age && a < kForgotten; ++a) weight *= 0.875f;
    return age < kForgotten ? weight : 0.0f;
  }
  static constexpr std::uint32_t tail(const Params&) { return kForgotten; }
};

}  // namespace kvlab
