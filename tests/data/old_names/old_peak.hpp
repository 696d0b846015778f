#pragma once

#include "policies/columns/by_column.hpp"

namespace kvlab {

/// Written for a version before 0.6.
struct OldPeak : HighestLeaves {
  static constexpr PolicyInfo kInfo{.name = "old_peak",
                                    .summary = "the largest key norm leaves first",
                                    .needs = Needs::nothing,
                                    .columns = {"key_norm"}};
  struct Slot {
    float norm;
  };
  static constexpr void admit(Slot& slot, Token token, const Params&, const Step&) {
    slot.norm = token.column[0];
  }
  static constexpr double rank(const Slot& slot, Token, const Params&, const Step&) {
    return -static_cast<double>(slot.norm);
  }
};

}  // namespace kvlab
