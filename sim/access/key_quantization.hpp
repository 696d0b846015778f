// Predicts from a trace whether 4-bit keys are safe, before any tier plan is tried.
#pragma once

#include <string>
#include <vector>

#include "traces/trace.hpp"

namespace kvlab {

/// By layer, the standard deviation of the score errors that 4-bit keys cause for the last query,
/// over the last tokens' keys, in nats. A common offset does not count, because softmax cancels it.
/// Empty if the head size is not a multiple of the block size.
std::vector<double> key_quantization_errors(const TraceReader& trace);

/// One line that names the layers in which 4-bit keys are unsafe; empty if there are none. The
/// cause is the bias of key projections, which is concentrated in few channels.
std::string key_quantization_warning(const TraceReader& trace);

}  // namespace kvlab
