// The formats through which copies of tokens are quantized, as tier plans keep them.
#pragma once

#include "kernels/quantized/quantized_cache.hpp"
#include "kernels/replay/replay.hpp"

namespace kvlab::kernels {

static_assert(kMaxReplayTiers == kMaxDeviceTiers);

/// The formats that a token passes on its demotion to a copy, as in demotion_path().
struct ReplayDemotionPath {
  int formats;  ///< 0: there is no such copy
  DeviceFormat format[kMaxDeviceTiers];
};

}  // namespace kvlab::kernels
