// Centred keys of an append: see policies/tiers/key_centre.hpp.
#pragma once

#include "kernels/evict/append.hpp"
#include "policies/tiers/key_centre.hpp"

namespace kvlab::kernels {

/// Writes each KV head's centre, the mean of its first `keys` keys, to `centres` [kv_head, dim].
/// `cache`: an append memory that holds the sequence from its first token on.
cudaError_t find_centres(const kvlab_cache_view& cache, std::uint32_t keys, float* centres,
                         cudaStream_t stream);

/// Subtracts the centres from the keys of `tokens` new tokens, from the new token `first` on. New
/// tokens follow the `cache.lengths` live ones.
cudaError_t subtract_centres(const kvlab_cache_view& cache, std::uint32_t first,
                             std::uint32_t tokens, const float* centres, cudaStream_t stream);

}  // namespace kvlab::kernels
