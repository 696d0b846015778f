// How copies of tokens are made as ladders keep them.
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

/// Makes all copies of keys, which `exact` are, after RoPE, or of values.
struct ReplayCodesArgs {
  ReplayShape shape;
  ReplayCopies copies;
  bool keys;
  Type type;
  const void* exact;  // [unit, token, dim]
  int own_units;      ///< as ReplayArgs has it
};
cudaError_t replay_codes(const ReplayCodesArgs& args, cudaStream_t stream);

}  // namespace kvlab::kernels
