// Through which codes copies of tokens are made, as ladders keep them.
#pragma once

#include "kernels/codes/coded_cache.hpp"
#include "kernels/replay/replay.hpp"

namespace kvlab::kernels {

static_assert(kMostReplayRungs == kMostRungs);

/// The codes that a token comes down through to a copy of its own, as way_down() says.
struct ReplayWay {
  int forms;  ///< 0: there is no such copy
  DeviceForm form[kMostRungs];
};

}  // namespace kvlab::kernels
