// Formats in which tier plans store tokens. The replay makes one copy of all tokens for each
// sequence of formats through which tokens are demoted.
#pragma once

#include "kernels/quantized/quantized_cache.hpp"
#include "kernels/replay/replay.hpp"

namespace kvlab::kernels {

static_assert(kMaxReplayTiers == kMaxDeviceTiers);

/// The formats through which the tokens of one copy were demoted, as demotion_path() returns them.
struct ReplayDemotionPath {
  int formats;  ///< 0: there is no such copy
  DeviceFormat format[kMaxDeviceTiers];
};

}  // namespace kvlab::kernels
