// Through which quantized values copies of tokens are made, as tier plans keep them.
#pragma once

#include "kernels/quantized/quantized_cache.hpp"
#include "kernels/replay/replay.hpp"

namespace kvlab::kernels {

static_assert(kMaxReplayTiers == kMaxDeviceTiers);

/// The quantized values that a token comes down through to a copy of its own, as demotion_path()
/// says.
struct ReplayDemotionPath {
  int formats;  ///< 0: there is no such copy
  DeviceFormat format[kMaxDeviceTiers];
};

}  // namespace kvlab::kernels
