// Stores and demotes tokens on tiers. Attention over tiers is in tier_attention.hpp and
// plain_kernels().
#pragma once

#include "kernels/evict/append.hpp"
#include "kernels/quantized/quantized_cache.hpp"
#include "policies/rule/eviction_order.hpp"

namespace kvlab::kernels {

/// Stores the tokens of a decode step, which are in newest_keys and newest_values. Call it before
/// their queries attend. Each token gets a row of the first tier, and the slot cache.next_slots.
/// `now` [sequence]: their positions.
cudaError_t store_newest(const kvlab_cache_view& cache, const QuantizedCache& quantized_cache,
                         const std::uint32_t* now, cudaStream_t stream);

/// If the first tier is full, demotes its first victim. A full tier that receives a token demotes
/// one too, and so on (demotion_chain()). `firsts` (TierChoice::firsts) contains the first victim
/// of each tier. Call it after the attention and the observations of a decode step. The token that
/// is evicted, from any tier, is in slot cache.next_slots.
cudaError_t demote_pairs(const EvictingAttentionArgs& args, const EvictionCandidate* firsts,
                         cudaStream_t stream);

/// compact() for a `from` whose tokens are on tiers (`quantized_cache`). Writes the dequantized
/// keys and values to `to`, and the quantized data that they come from to `staged`.
cudaError_t read_from_tiers(const DevicePolicy& policy, const kvlab_compact_args& args,
                            const QuantizedCache& quantized_cache, const StagedTiers& staged,
                            cudaStream_t stream);
/// compact() for a `to` that has these tiers. `from` holds the tokens that read_from_tiers() wrote,
/// followed by new tokens. Assigns all tokens to tiers if some are evicted or the first tier is
/// full.
cudaError_t compact_to_tiers(const DevicePolicy& policy, const kvlab_compact_args& args,
                             const QuantizedCache& quantized_cache, const StagedTiers& staged,
                             cudaStream_t stream);

}  // namespace kvlab::kernels
