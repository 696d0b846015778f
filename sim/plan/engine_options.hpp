// The options with which serving engines keep their KV cache as a plan says.
#pragma once

#include <string>
#include <string_view>

#include "sim/plan/format_plan.hpp"

namespace kvlab {

/// The options of `engine`, which is vllm, llama.cpp or tensorrt-llm: a part of a command line, or
/// for TensorRT-LLM lines of the file for --extra_llm_api_options. Throws std::invalid_argument for
/// another engine, and for a plan that the engine cannot express. The message names what the engine
/// cannot express, and what to do instead.
std::string engine_options(const PlanFile& plan, std::string_view engine);

}  // namespace kvlab
