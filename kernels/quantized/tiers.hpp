// Tokens on tiers: how they come there and are demoted. Attention over them: plain_kernels().
#pragma once

#include "kernels/evict/append.hpp"
#include "kernels/quantized/quantized_cache.hpp"

namespace kvlab::kernels {

struct EvictionCandidate;

/// A step's tokens, as newest_keys and newest_values hold them, to their rows of the first tier and
/// to cache.next_slots; before they attend. `now` [sequence]: their positions.
cudaError_t store_newest(const kvlab_cache& cache, const QuantizedCache& quantized_cache,
                         const std::uint32_t* now, cudaStream_t stream);

/// Behind attention and observation of such a step: on each tier that is full the first to
/// leave, as TierChoice::firsts says, is demoted; who passes the last is the token that
/// cache.next_slots names.
cudaError_t demote_pairs(const EvictingAttentionArgs& args, const EvictionCandidate* firsts,
                         cudaStream_t stream);

/// compact(), where `from` has its tokens on tiers, `quantized_cache`: keys and values of `to` are
/// what is read, and `staged` what it is read from.
cudaError_t read_from_tiers(const DevicePolicy& policy, const kvlab_shrink_args& args,
                            const QuantizedCache& quantized_cache, const StagedTiers& staged,
                            cudaStream_t stream);
/// compact(), where `to` has those tiers and `from` came by read_from_tiers(), new tokens behind
/// it. All are assigned to tiers where some leave or the first tier is full.
cudaError_t compact_to_tiers(const DevicePolicy& policy, const kvlab_shrink_args& args,
                             const QuantizedCache& quantized_cache, const StagedTiers& staged,
                             cudaStream_t stream);

}  // namespace kvlab::kernels
