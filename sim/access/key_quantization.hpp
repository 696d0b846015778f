// Predicts from a trace whether 4-bit keys are safe, before any tier plan is tried.
#pragma once

#include <string>
#include <vector>

#include "traces/trace.hpp"

namespace kvlab {

/// Quantizes the keys of the last tokens to 4 bits. Returns, for each layer, the standard deviation
/// (in nats) of the resulting errors in the scores of the last query. An offset that all scores
/// have in common does not count, because softmax cancels it. The result is empty if the head size
/// is not a multiple of the block size.
std::vector<double> key_quantization_errors(const TraceReader& trace);

/// One line that names the layers in which 4-bit keys are unsafe; empty if there are none. The
/// usual cause is that the key projection has a bias that is large in a few channels.
std::string key_quantization_warning(const TraceReader& trace);

}  // namespace kvlab
