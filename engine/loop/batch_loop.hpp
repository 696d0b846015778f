// The closed loop of many sequences and configurations side by side, teacher-forced: what differs
// by budget alone, and windows of a text, share every reading of the weights.
#pragma once

#include "engine/batch_decoder.hpp"
#include "engine/loop/closed_loop.hpp"

namespace kvlab {

/// As run_decoder_loop() of each sequence under every configuration, Span::decode, but batch by
/// batch: [sequence][configuration]. Throws std::runtime_error where not even one sequence fits the
/// device's memory.
std::vector<std::vector<LoopScores>> run_batch_loop(
    BatchBackend& backend, const std::vector<std::vector<std::int32_t>>& sequences,
    std::span<const CacheConfig> configs, const LoopOptions& options);

}  // namespace kvlab
