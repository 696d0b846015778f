// Converts a plan of storage formats to the options of serving engines.
#pragma once

#include <string>
#include <string_view>

#include "sim/plan/format_plan.hpp"

namespace kvlab {

/// The options with which `engine` stores its KV cache in the formats of `plan`. For vllm and
/// llama.cpp they are part of a command line; for tensorrt-llm, lines of the file that
/// `--extra_llm_api_options` names; for transformers, a Python expression for `past_key_values`.
/// Throws std::invalid_argument for another engine, and for a plan that the engine does not
/// support. The message says what the engine does not support, and what to do instead.
std::string engine_options(const PlanFile& plan, std::string_view engine);

}  // namespace kvlab
