// The closed loop token by token, through a device's own decoder: teacher-forced, every
// configuration beside the full cache.
#pragma once

#include "engine/backend.hpp"
#include "engine/loop/closed_loop.hpp"

namespace kvlab {

/// As run_closed_loop(), by decoders of `backend`. The prompt is admitted by each configuration's
/// prefill, every other token by itself. Bytes are those of the device's dtype.
std::vector<LoopScores> run_decoder_loop(Backend& backend, std::span<const std::int32_t> ids,
                                         std::span<const CacheConfig> configs,
                                         const LoopOptions& options);

}  // namespace kvlab
