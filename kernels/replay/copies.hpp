// Formats in which tier plans store tokens. The replay makes one copy of all tokens for each way to
// be demoted.
#pragma once

#include "kernels/quantized/quantized_cache.hpp"
#include "kernels/replay/replay.hpp"

namespace kvlab::kernels {

static_assert(kMaxReplayTiers == kMaxDeviceTiers);

/// The formats through which a token of one copy was demoted, as in demotion_path().
struct ReplayDemotionPath {
  int formats;  ///< 0: there is no such copy
  DeviceFormat format[kMaxDeviceTiers];
};

}  // namespace kvlab::kernels
