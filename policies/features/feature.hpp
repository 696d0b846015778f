// feature: evicts the token with the lowest value of a feature, or the highest.
//
// It is not from a paper. It serves to test a score that another program has computed, one number
// per token (docs/reference/configurations.md). `feature:name=NAME` reads the feature NAME; without
// a name it reads value_norm.
#pragma once

#include "policies/policy.hpp"

namespace kvlab {

struct Feature {
  static constexpr PolicyInfo kInfo{
      .name = "feature",
      .summary = "evicts the token with the lowest value of a feature; `name=` selects the feature",
      .citation = "none: any score of one number per token",
      .order = Order::nested,
      .features = {"name=value_norm"}};
  struct Params {
    double keep;
  };
  static constexpr Param<Params> kParams[]{
      {"keep", "sign: 1 keeps the highest values, below 0 keeps the lowest", &Params::keep, 1, -1,
       1}};
  struct Slot {};

  static constexpr void append(Slot&, Token, const Params&, const Step&) {}
  static constexpr double rank(const Slot&, Token token, const Params& params, const Step&) {
    const double value = token.feature[0];
    return params.keep < 0 ? -value : value;
  }
};

}  // namespace kvlab
