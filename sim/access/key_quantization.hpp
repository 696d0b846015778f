// Predicts from a trace whether 4-bit keys are safe, before any tier plan is tried.
#pragma once

#include <string>
#include <vector>

#include "traces/trace.hpp"

namespace kvlab {

/// For each layer, the standard deviation in nats of the errors that 4-bit keys cause in the last
/// query's scores, over the keys of the last tokens. An offset that all scores have in common does
/// not count, because softmax cancels it. Empty if the head size is not a multiple of the block
/// size.
std::vector<double> key_quantization_errors(const TraceReader& trace);

/// One line that names the layers in which 4-bit keys are unsafe; empty if there are none. The
/// usual cause is a bias of the key projection that is large in few channels.
std::string key_quantization_warning(const TraceReader& trace);

}  // namespace kvlab
