// leaky: a policy for tests. It uses all that a policy may have: parameters, weights, mass and
// requests, and arithmetic on doubles.
#pragma once

#include "policies/policy.hpp"

namespace kvlab {

struct Leaky {
  static constexpr PolicyInfo kInfo{.name = "leaky",
                                    .summary = "accumulated mass that leaks at each observation",
                                    .citation = "made up for the tests",
                                    .needs = Needs::both,
                                    .weighted = true,
                                    .sinks = tokens(1),
                                    .recent = percent(25)};
  struct Params {
    double keep, slope, span;
  };
  static constexpr Param<Params> kParams[] = {
      {"keep", "share of the mass that stays", &Params::keep, 0.9, 0, 1},
      {"slope", "of the weight, by age", &Params::slope, 0.125, 0, 10},
      {"span", "number of last queries that count", &Params::span, 64, 1, 1e6}};
  struct Slot {
    std::uint64_t mass;
    std::uint32_t requests, queries;
  };

  static constexpr float weight(std::uint32_t age, const Params& params) {
    return age < tail(params) ? static_cast<float>(1 / (1 + params.slope * age)) : 0.0f;
  }
  static constexpr std::uint32_t tail(const Params& params) {
    return static_cast<std::uint32_t>(params.span);
  }
  static constexpr void append(Slot& slot, Token, const Params&, const Step&) { slot = {}; }
  static constexpr void observe(Slot& slot, const Observation& seen, const Params& params,
                                const Step&) {
    slot.mass =
        static_cast<std::uint64_t>(static_cast<double>(slot.mass) * params.keep) + seen.mass;
    slot.requests += seen.requests;
    slot.queries += seen.queries;
  }
  static constexpr std::uint64_t rank(const Slot& slot, Token, const Params& params,
                                      const Step& step) {
    const double mean = static_cast<double>(slot.mass) / (slot.queries + 1.0);
    return static_cast<std::uint64_t>(mean * params.keep + slot.requests * (1.0 / 3) + step.budget);
  }
};

}  // namespace kvlab
