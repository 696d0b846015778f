// The closed loop token by token, through a device's own decoder: teacher-forced, every
// configuration beside the full cache.
#pragma once

#include "engine/backend.hpp"
#include "engine/loop/closed_loop.hpp"

namespace kvlab {

/// A decoder's cache for a sequence of so many tokens under a configuration.
CacheOptions loop_cache(const LoopConfig& config, std::uint32_t tokens, std::uint32_t sequence);

/// As run_closed_loop(), by decoders of `backend`. The prompt is admitted by each configuration's
/// prefill, every other token by itself. Bytes are those of the device's dtype.
std::vector<LoopScores> run_decoder_loop(Backend& backend, std::span<const std::int32_t> ids,
                                         std::span<const LoopConfig> configs,
                                         const LoopOptions& options);

}  // namespace kvlab
