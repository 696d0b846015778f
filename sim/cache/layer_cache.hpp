// The caches of the KV heads of one layer, on the host. For each append, a caller passes queries,
// keys and values of all heads to step().
#pragma once

#include <cstdint>
#include <deque>

#include "policies/cache_config.hpp"
#include "sim/cache/host_cache.hpp"

namespace kvlab {

/// Queries, keys and values of an append, before RoPE, and where its outputs go.
struct LayerRows {
  std::uint32_t first, tokens;  ///< position of the first token; number of tokens
  const float* q;               // [token, kv_heads * group, dim]
  const float *k, *v;           // [token, kv_heads, dim]
  float* out;                   // [token, kv_heads * group, dim]; null: not computed
  // [token, kv_heads * group]: log-sum-exp of the scores (natural logarithm); null: not computed.
  float* lse = nullptr;
};

/// Whether a prompt may be split into any chunks without an effect on the cache. This is so if
/// nothing is evicted, observed or quantized.
bool any_chunk(const ResolvedConfig& config);

class LayerCache {
 public:
  /// Makes empty caches for `kv_heads` KV heads of layer `layer`. `output`: the weights from which
  /// some features are computed; may be null. The weights must outlive the caches.
  LayerCache(const ResolvedConfig& config, const HeadShape& shape, std::uint32_t kv_heads,
             std::uint32_t layer, const OutputProjections* output = nullptr);

  /// Copies `other`, which must be between two appends.
  LayerCache(const LayerCache& other);
  LayerCache& operator=(const LayerCache&) = delete;

  std::deque<HostCache>& heads() { return heads_; }
  const std::deque<HostCache>& heads() const { return heads_; }

  /// HostCache::step() for all heads. `rope` must cover the last position.
  void step(const LayerRows& rows, const RopeTable& rope, unsigned threads);
  /// HostCache::attend_draft() for all heads.
  void attend_draft(const LayerRows& rows, std::span<const DraftPath> paths, const RopeTable& rope,
                    unsigned threads);
  void drop_drafts();
  /// Whether the heads have one common eviction order or share their slots. Then all heads have to
  /// finish a step before one of them evicts.
  bool evicts_together() const { return evicts_together_; }
  /// Ends a prompt segment.
  void end_prompt();
  /// One KV head's part of an append.
  HeadAppend head_append(const LayerRows& rows, std::size_t head) const;

 private:
  void share_ranks_of_heads();
  void evict_together(std::uint32_t now);
  void show(const LayerRows& rows, const Rope& rope) const;

  HeadShape shape_;
  bool observes_ = false, evicts_together_ = false;
  std::uint32_t tokens_ = 0;  // tokens appended so far
  LiveSet::Identity identity_;
  // The policy, if it reads rows (see_rows()); otherwise null.
  std::shared_ptr<const PolicyEntry> looker_;
  std::deque<HostCache> heads_;
};

}  // namespace kvlab
