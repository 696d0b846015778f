// Options of a CUDA decoder and its cache.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/decoder.hpp"
#include "kernels/cache/kv_cache_config.hpp"
#include "policies/features/features.hpp"

namespace kvlab {

struct CudaDecoderOptions {
  int sequences = 1;
  std::uint32_t slots = 0;  ///< maximum length of each sequence; 0: no limit, if each has a budget
  std::uint32_t prefill_tokens =
      2048;              ///< number of prompt tokens that go through a layer together
  bool capture = false;  ///< keep q, k, v before RoPE, out and lse; needs one sequence
  /// [sequence], all with the same policy and kind of positions; empty: every sequence has the full
  /// cache
  std::vector<ResolvedConfig> caches;
  /// Number of tokens of the longest prompt, so that fits() can count its memory. 0: unknown; the
  /// memory is allocated when the prompt is fed.
  std::uint32_t longest_prompt = 0;
  bool watched = false;  ///< allow observers of the caches; slow
  bool plain_eviction =
      false;  ///< evict with kernels/evict/plain_eviction.cu, which is slow but works on any device

  bool evicts() const { return !caches.empty(); }
  bool keeps_outputs() const { return capture || watched; }
  /// Maximum number of rows that go through a layer together.
  int rows() const { return std::max(static_cast<int>(prefill_tokens), sequences); }

  // Valid only if evicts():
  const std::shared_ptr<const PolicyEntry>& entry() const { return caches.front().policy.entry; }
  const PolicyInfo& policy() const { return entry()->info; }
  /// Whether any cache is quantized.
  bool is_quantized() const {
    return std::ranges::any_of(
        caches, [](const ResolvedConfig& cache) { return cache.policy.tier_plan.is_quantized(); });
  }
  kvlab_feature_args features(int hidden) const {
    kvlab_feature_args list{.hidden = hidden};
    for (const std::string& name : caches.front().policy.features)
      list.features[list.count++] = static_cast<kvlab_feature>(built_in_feature(name).value());
    return list;
  }
  kvlab_numbering numbering() const {
    if (caches.front().positions == Positions::original) return KVLAB_ORIGINAL_POSITIONS;
    return policy().oldest_first ? KVLAB_CACHE_POSITIONS_ROTATED : KVLAB_CACHE_POSITIONS;
  }
};

}  // namespace kvlab
