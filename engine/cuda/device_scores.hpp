// Scores rows of logits in device memory, on the device.
#pragma once

#include <vector>

#include "engine/sampler.hpp"

namespace kvlab {

/// Returns the scores [row]. Runs on the default stream and waits. Throws std::runtime_error if the
/// device fails.
std::vector<RowScore> device_scores(const ScoredRows& rows, std::uint32_t vocab);

}  // namespace kvlab
