// Whether keys may be kept in 4 bits, asked of a trace before any tier plan is tried.
#pragma once

#include <string>
#include <vector>

#include "traces/trace.hpp"

namespace kvlab {

/// By layer, how far quantized values of 4 bits move the scores of the last query among the last
/// tokens' keys, nats: the deviation, since a softmax does not see what they share. Empty of heads
/// that are no whole blocks of channels.
std::vector<double> key_quantization_errors(const TraceReader& trace);

/// Says in one line in which layers quantized values of 4 bits are unsafe; empty: in none. Biases
/// of key projections, which lie in few channels, do that.
std::string key_quantization_warning(const TraceReader& trace);

}  // namespace kvlab
