// The cache of one KV head of one layer: keys and values of the live tokens, and attention over
// them.
//
// The arithmetic is a replay's, step for step and from the same primitives, so that a decoder and a
// replay of its trace reach equal bits: logits by `multiply_fused`, gathered by age, scaled,
// exponentials, one sum, one division, values added by age.
#pragma once

#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "policies/aged_set.hpp"
#include "policies/features/features.hpp"
#include "policies/tally.hpp"
#include "traces/base/numeric/panels.hpp"
#include "traces/base/numeric/rope.hpp"

namespace kvlab {

/// What the heads of one layer have in common.
struct HeadShape {
  std::uint32_t head_size, group;  ///< `group`: query heads that share a KV head
  Positions positions = Positions::original;
  float softmax_scale = 1.0f;
  std::uint32_t threshold16 = 0;  ///< threshold of requests
  std::uint32_t window = 0;       ///< tokens that a query sees, itself included; 0: all
  float softcap = 0;              ///< as in RowSpec, like `sinks`
  std::vector<float> sinks = {};  // [query head]
};

/// Queries, keys and values of one KV head in an append, before RoPE, and where its outputs go.
/// Rows of tokens are `*_stride` floats apart.
struct HeadAppend {
  std::uint32_t first, tokens;
  const float* q;  // [token, group, dim]
  float* out;      // [token, group, dim]
  std::size_t query_stride;
  const float *k, *v;  // [token, dim]
  std::size_t key_stride;
  float* lse;  // [token, group], natural logarithm
  std::size_t lse_stride;
};

class HeadCache {
 public:
  /// `live`: an empty set. `output`: weights for features that are computed from them.
  /// `feature_values`: given features of the prompt's tokens, which are not computed.
  HeadCache(const HeadShape& shape, LiveSet live, OutputWeights output = {},
            FeaturesByName feature_values = {});

  /// Copies the state of `other` after step 4. The copy shares ranks with no other head until
  /// share_ranks().
  HeadCache(const HeadCache& other);
  HeadCache& operator=(const HeadCache&) = delete;

  /// Step 1. Returns the evicted positions, ascending.
  std::span<const std::uint32_t> evict_to_budget(std::uint32_t now);
  /// Step 2. `rope` must cover the append's last position.
  void append(const HeadAppend& append, const RopeTable& rope);
  /// Step 3 for tokens [begin, end) of the append. Several threads may attend at once.
  void attend(const HeadAppend& append, std::uint32_t begin, std::uint32_t end,
              const RopeTable& rope);
  /// Step 4. Returns what each live token received, by age; empty if the policy needs nothing.
  std::span<const Observation> observe();
  /// Drops all but the first `tokens` tokens, as LiveSet::crop() does.
  void crop(std::uint32_t tokens) { live_.crop(tokens); }
  /// Ends a prompt segment.
  void end_prompt() { live_.end_prompt(); }
  /// For share_ranks().
  AgedSet& aged_set() { return live_; }

  const LiveSet& live() const { return live_; }
  /// Number of rows in use: after a prompt as many as the budget keeps live, before its end at most
  /// twice the live tokens, or a few.
  std::uint32_t row_count() const { return live_.slot_count(); }
  /// Bytes of the live tokens: of their quantized values, or 4 bytes for each element.
  std::uint64_t live_bytes() const {
    std::uint64_t bytes = 0;
    if (!live_.is_quantized())
      return std::uint64_t{live_.size()} * 2 * shape_.head_size * sizeof(float);
    for (const std::uint32_t row : live_.slots())
      bytes += is_quantized(row) ? live_.tier_plan()[tiers_[row]].format->block_bytes() *
                                       shape_.head_size / kQuantBlock
                                 : 2 * shape_.head_size * sizeof(float);
    return bytes;
  }
  /// Bytes of memory that keys and values take, spare rows included. Keys are stored by sixteen.
  std::size_t bytes() const {
    return keys_.bytes() + (values_.capacity() + plain_keys_.capacity()) * sizeof(float);
  }

 private:
  std::uint32_t visible(const HeadAppend& append, std::uint32_t token) const {
    return live_.size() - append.tokens + token + 1;
  }
  /// The age of the oldest token that `token` sees.
  std::uint32_t first_visible(const HeadAppend& append, std::uint32_t token) const;
  bool has_spare_rows() const;
  void compact();
  void grow_to(std::size_t rows);
  void store(const HeadAppend& append, const RopeTable& rope);
  void rotate_to_cache_positions(const RopeTable& rope);
  /// Quantizes the rows of the live tokens of ages [first, last) as their tiers keep them.
  void demote(std::uint32_t first, std::uint32_t last);
  bool is_quantized(std::uint32_t row) const {
    return tiers_[row] >= 0 && !live_.tier_plan()[tiers_[row]].format->exact();
  }
  /// How queries are rotated: to their original positions, to their cache positions, or to their
  /// original positions and then by the Hadamard rotation.
  enum class QueryRotation { to_position, to_number, hadamard_rotated };
  void accumulate(std::span<const float> p, std::span<const std::uint32_t> rows, float* out) const;
  void multiply_at(const HeadAppend& append, std::uint32_t begin, std::uint32_t end,
                   QueryRotation rotation, std::size_t panels, const RopeTable& rope,
                   std::vector<float>& by_row) const;

  HeadShape shape_;
  LiveSet live_;
  FeatureMaker features_;
  FeaturesByName feature_values_;
  std::vector<std::uint32_t> victims_;
  // A token's row is its slot.
  Panels keys_;                // [row, dim], rotated
  std::vector<float> values_;  // [row, dim]
  std::vector<float>
      plain_keys_;  // [row, dim], before RoPE; only where positions are cache positions
  std::vector<std::uint32_t> rotated_to_;  // [row]: the position that a key is rotated to; only
                                           // with cache positions
  std::vector<int>
      tiers_;  // [row]: the tier of its format; -1: not quantized; only with quantization
  std::uint32_t old_ = 0;  // oldest live tokens, which are rotated to cache positions

  std::mutex seen_mutex_;
  Tally seen_;
};

}  // namespace kvlab
