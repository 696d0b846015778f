// The caches of one layer's KV heads, for whoever computes queries, keys and values elsewhere.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>

#include "engine/head_cache.hpp"
#include "policies/cache_config.hpp"

namespace kvlab {

/// What tokens that come together bring, before RoPE, and where their outputs go.
struct LayerTokens {
  const float* q;      // [token, kv_heads * group, dim]
  const float *k, *v;  // [token, kv_heads, dim]
  float* out;          // as q
  std::uint32_t tokens;
  bool is_prompt;  ///< all of a prompt segment; otherwise decoded one by one
};

class LayerCache {
 public:
  /// `kv_heads` KV heads of layer `layer`, empty, under `config`.
  LayerCache(const ResolvedConfig& config, const HeadShape& shape, std::uint32_t kv_heads,
             std::uint32_t layer, Rope rope);

  /// The four steps of the rule for each admission that the rows make.
  void attend(const LayerTokens& rows, unsigned threads);

  std::uint32_t tokens() const { return tokens_; }
  const LiveSet& live(std::uint32_t kv_head) const { return heads_.at(kv_head).live(); }

 private:
  void admit(const LayerTokens& rows, std::uint32_t first, std::uint32_t count, unsigned threads);

  ResolvedConfig config_;
  HeadShape shape_;
  Rope rope_;
  std::optional<RopeTable> table_;  // of all positions so far
  std::deque<HeadCache> heads_;
  std::uint32_t tokens_ = 0;
};

}  // namespace kvlab
