// roco: ranks by the mean and the standard deviation of a token's attention. Evicts tokens whose
// attention is low and steady; keeps a token that sometimes gets much attention.
//
// Ren and Zhu 2024, "On the Efficacy of Eviction Policy for Key-Value Constrained Generative
// Language Model Inference", section 4 (RoCo: mean attention score, and an eviction scope that
// leaves out the tokens of largest standard deviation). Deliberate differences from the paper and
// its code (EasyKV):
//   - rank() only has the data of one token, so it cannot exclude the 30% of the tokens that have
//     the largest deviation. Here mean and deviation are combined: mean^2 + spread * deviation^2.
//     With spread=1 this orders by the root mean square, with spread=0 by the mean;
//   - the rank is in units of 2^-44, rounded down;
//   - an append of many queries only provides the sum of the attention, so all its queries are
//     assumed to give the same attention;
//   - masses of the query heads of a group are summed; the 10 youngest tokens are protected, as in
//     the authors' code; each KV head keeps one set of tokens; one token is evicted per step; at
//     equal rank, the older token is evicted.
#pragma once

#include "policies/policy.hpp"

namespace kvlab {

struct Roco {
  static constexpr PolicyInfo kInfo{
      .name = "roco",
      .summary = "evicts the token with the least mean attention, unless its attention varies much",
      .citation = "Ren and Zhu 2024, RoCo, section 4 (arXiv:2402.06262)",
      .needs = Needs::mass,
      .recent = tokens(10)};
  struct Params {
    double spread;
  };
  static constexpr Param<Params> kParams[] = {
      {"spread", "weight of the variance relative to the squared mean", &Params::spread, 1, 0, 8}};
  struct Slot {
    std::uint64_t mass;  // Q32.32
    double squares;      // sum over queries of the squared attention
    std::uint32_t queries;
  };

  static constexpr void append(Slot& slot, Token, const Params&, const Step&) {
    slot.mass = 0;
    slot.squares = 0;
    slot.queries = 0;
  }
  static constexpr void observe(Slot& slot, const Observation& seen, const Params&, const Step&) {
    const double given = static_cast<double>(seen.mass) * kUnit;
    slot.mass += seen.mass;
    slot.squares += given * given / (seen.queries > 0 ? seen.queries : 1);
    slot.queries += seen.queries;
  }
  static constexpr std::uint64_t rank(const Slot& slot, Token, const Params& params, const Step&) {
    const double queries = slot.queries > 0 ? slot.queries : 1;
    const double mean = static_cast<double>(slot.mass) * kUnit / queries;
    const double square = mean * mean, variance = slot.squares / queries - square;
    return static_cast<std::uint64_t>((square + (variance > 0 ? params.spread * variance : 0.0)) *
                                      kFine);
  }

 private:
  static constexpr double kUnit = 1.0 / 4294967296.0;  // 2^-32
  static constexpr double kFine = 17592186044416.0;    // 2^44
};

}  // namespace kvlab
