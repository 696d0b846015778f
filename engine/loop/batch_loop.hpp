// The closed loop of many sequences and configurations side by side, teacher-forced: what differs
// by budget alone, and windows of a text, share every reading of the weights.
#pragma once

#include "engine/backend.hpp"
#include "engine/loop/closed_loop.hpp"

namespace kvlab {

struct BatchLoopOptions {
  std::uint32_t prompt_tokens = 0;       ///< of each sequence; 0: half of it
  bool against_first = true;             ///< as LoopOptions'
  std::function<void(double)> progress;  ///< may be empty; gets the share that is done
};

/// As run_decoder_loop() of each sequence under every configuration, Span::decode, but batch by
/// batch: [sequence][configuration]. Throws std::runtime_error where not even one sequence fits the
/// device's memory.
std::vector<std::vector<LoopScores>> run_batch_loop(
    Backend& backend, const std::vector<std::vector<std::int32_t>>& sequences,
    std::span<const CacheConfig> configs, const BatchLoopOptions& options);

}  // namespace kvlab
