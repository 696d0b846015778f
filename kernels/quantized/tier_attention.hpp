// Decode attention over tokens on tiers, by the tensor cores.
#pragma once

#include "kernels/decode/pair_attention.hpp"
#include "kernels/quantized/quantized_cache.hpp"

namespace kvlab::kernels {

/// Bytes.
std::size_t tier_attention_workspace(const PairAttention& args);
/// pair_attention() where keys and values lie on tiers: neither they nor ages, rules and lengths
/// are looked at. bf16 and fp16.
cudaError_t tier_attention(PairAttention args, const QuantizedCache& quantized_cache,
                           cudaStream_t stream);

}  // namespace kvlab::kernels
