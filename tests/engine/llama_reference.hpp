// A plain forward pass of Llama in float64, which shares no arithmetic with the decoder. Tests
// compare the decoder with it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

#include "engine/checkpoint/model.hpp"

namespace kvlab {

/// Logits [token, vocab] of a Llama checkpoint in one safetensors file with tied embeddings.
std::vector<double> llama_logits(const std::filesystem::path& directory, const ModelConfig& config,
                                 std::span<const std::int32_t> ids);

}  // namespace kvlab
