// column: by a column's value alone. The token with the lowest leaves first, or with the highest.
//
// Not from a paper: it tries a score that somebody has computed (docs/reference/configurations.md),
// one number a token. `column:name=NAME` reads NAME; without a name it reads value_norm.
#pragma once

#include "policies/policy.hpp"

namespace kvlab {

struct Column {
  static constexpr PolicyInfo kInfo{
      .name = "column",
      .summary = "the lowest value of a column leaves first: `name=` says of which",
      .citation = "none: any score of one number a token",
      .order = Order::nested,
      .columns = {"name=value_norm"}};
  struct Params {
    double keep;
  };
  static constexpr Param<Params> kParams[]{
      {"keep", "the highest values stay; below 0: the lowest", &Params::keep, 1, -1, 1}};
  struct Slot {};

  static constexpr void admit(Slot&, Token, const Params&, const Step&) {}
  static constexpr double rank(const Slot&, Token token, const Params& params, const Step&) {
    const double value = token.column[0];
    return params.keep < 0 ? -value : value;
  }
};

}  // namespace kvlab
