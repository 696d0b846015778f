// Decode attention over tokens on tiers, on tensor cores.
#pragma once

#include "kernels/decode/pair_attention.hpp"
#include "kernels/quantized/quantized_cache.hpp"

namespace kvlab::kernels {

/// Returns the bytes of the workspace.
std::size_t tier_attention_workspace(const PairAttention& args);
/// pair_attention() for keys and values on tiers. Ignores the keys, values, ages, rules and lengths
/// of the arguments. Supports bf16 and fp16.
cudaError_t tier_attention(PairAttention args, const QuantizedCache& quantized_cache,
                           cudaStream_t stream);

}  // namespace kvlab::kernels
