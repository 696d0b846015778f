// The caches of one layer's KV heads. Whoever computes queries, keys and values takes the four
// steps of the rule with it: evict_to_budget() of each head, attend(), observe() of each head.
#pragma once

#include <cstdint>
#include <deque>

#include "engine/cache/head_cache.hpp"
#include "policies/cache_config.hpp"

namespace kvlab {

/// What the tokens of an append bring, before RoPE, and where their outputs go.
struct LayerRows {
  std::uint32_t first, tokens;  ///< position of the first one, and how many
  const float* q;               // [token, kv_heads * group, dim]
  const float *k, *v;           // [token, kv_heads, dim]
  float* out;                   // as q
  float* lse;                   // [token, kv_heads * group], natural logarithm
};

class LayerCache {
 public:
  /// `kv_heads` KV heads of layer `layer`, empty, under `config`. `output`: for features that are
  /// computed from it, which outlive the cache; or null.
  LayerCache(const ResolvedConfig& config, const HeadShape& shape, std::uint32_t kv_heads,
             std::uint32_t layer, const OutputProjections* output = nullptr);

  /// What `other` holds between two appends.
  LayerCache(const LayerCache& other);
  LayerCache& operator=(const LayerCache&) = delete;

  std::deque<HeadCache>& heads() { return heads_; }
  const std::deque<HeadCache>& heads() const { return heads_; }

  /// Steps 2 and 3 for all heads. `rope` covers the last position. Outputs that are not wanted are
  /// computed only for what a policy observes.
  void attend(const LayerRows& rows, const RopeTable& rope, unsigned threads,
              bool wants_outputs = true);
  /// That was the end of a prompt segment.
  void end_prompt();

 private:
  void share_ranks_of_heads();
  HeadAppend head_append(const LayerRows& rows, std::size_t head) const;
  void show(const LayerRows& rows, const Rope& rope) const;

  HeadShape shape_;
  bool observes_ = false;
  std::uint32_t tokens_ = 0;  // so far
  LiveSet::Identity identity_;
  std::shared_ptr<const PolicyEntry> looker_;  // null: rows are not observed
  std::deque<HeadCache> heads_;
};

}  // namespace kvlab
