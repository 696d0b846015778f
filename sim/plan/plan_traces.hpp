// The traces from which `kvlab plan` makes a plan or a centre file.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "policies/tiers/centre_setting.hpp"
#include "traces/trace.hpp"

namespace kvlab {

/// The numbers of the model's layers without a window. Throws std::invalid_argument if the traces
/// are of different models, if the model has no such layers, or if its heads cannot be quantized.
std::vector<std::uint32_t> planned_layers(std::span<const TraceReader* const> traces);

/// Computes the centres of `centre=prompt` on each trace, and returns their mean over the traces.
/// Throws std::invalid_argument if a trace does not begin with a prompt of at least two tokens, and
/// in the cases in which planned_layers() throws.
CentreConstants mean_centres(std::span<const TraceReader* const> traces);

}  // namespace kvlab
