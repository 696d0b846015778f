// How many positions a sequence needs, beside those that its model was trained on.
#pragma once

#include <cstdint>
#include <string>

#include "engine/decoder.hpp"

namespace kvlab {

/// Positions that the model will meet in `length` tokens: of the whole sequence, or of the cache
/// where they are squeezed.
std::uint32_t longest_span(const ResolvedConfig& cache, std::uint32_t longest_prompt,
                           std::uint32_t length);

/// The cache that stays within what the model was trained on, whatever the length: advice for the
/// two below.
std::string squeezed_cache(const ModelConfig& config);

/// Throws std::invalid_argument where prompts alone need more positions than the model was trained
/// on. The message says what would fit, and `advice`.
void refuse_beyond_context(const ModelConfig& config, std::uint32_t span,
                           const std::string& advice = "");

/// What to warn of before decoding over so many positions; "": nothing.
std::string context_warning(const ModelConfig& config, std::uint32_t span,
                            const std::string& advice = "");

}  // namespace kvlab
