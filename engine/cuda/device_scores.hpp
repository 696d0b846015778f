// Rows of logits in device memory, scored there.
#pragma once

#include <vector>

#include "engine/sampler.hpp"

namespace kvlab {

/// [row], on the default stream; waits. Throws std::runtime_error.
std::vector<RowScore> device_scores(const ScoredRows& rows, std::uint32_t vocab);

}  // namespace kvlab
