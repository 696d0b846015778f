// streaming_h2o: heavy hitters with cache positions, so that a stream may be longer than the
// trained context.
//
// Zhang et al. 2023, "H2O: Heavy-Hitter Oracle", section 5.3 (streaming). No single public
// implementation defines it. Deliberate differences: the same as for h2o; no fixed sinks, because
// the accumulated attention of the first tokens keeps them in the cache; in a chunked prompt, live
// tokens are numbered before each chunk; keys are never rotated in place.
#pragma once

#include "policies/mass/h2o.hpp"

namespace kvlab {

struct StreamingH2O : AccumulatedMass {
  static constexpr PolicyInfo kInfo{
      .name = "streaming_h2o",
      .summary = "same as h2o, with the kept tokens at cache positions",
      .citation = "Zhang et al. 2023, H2O, section 5.3 (arXiv:2306.14048)",
      .needs = Needs::mass,
      .recent = percent(50),
      .positions = Positions::cache};
};

}  // namespace kvlab
