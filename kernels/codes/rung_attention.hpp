// Decode attention over tokens on rungs, by the tensor cores.
#pragma once

#include "kernels/codes/coded_cache.hpp"
#include "kernels/decode/pair_attention.hpp"

namespace kvlab::kernels {

/// Bytes.
std::size_t rung_attention_workspace(const PairAttention& args);
/// pair_attention() where keys and values lie on rungs: neither they nor ages, rules and lengths
/// are looked at. bf16 and fp16.
cudaError_t rung_attention(PairAttention args, const CodedCache& coded, cudaStream_t stream);

}  // namespace kvlab::kernels
