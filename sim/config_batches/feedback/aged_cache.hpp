// The live tokens of one cache as the feedback configuration batch stores them: as a list by age,
// and as one bit for each position.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "policies/aged_set.hpp"
#include "sim/config_batches/group_rows.hpp"
#include "sim/oracles/oracle.hpp"

namespace kvlab {

// Cache positions change the logits of a token only if a token younger than it has been evicted,
// because RoPE logits depend only on the distance between query and key. AgedKeys stores the keys
// of these tokens: the live tokens that are older than some evicted token. Each key is rotated to
// its cache position. When a token older than the key is evicted, the key's cache position changes,
// so the unrotated key is rotated again (HostCache does the same).
//
// Tokens that are younger than every evicted token keep their distance to the query. Their logits
// come from rows that all configurations share.

/// cos and sin at the cache positions, in panels of 32 positions: [position / 32][half][32].
class CachePositionTable {
 public:
  /// `rope` must outlive this.
  CachePositionTable(const RopeTable& rope, std::size_t half);
  const float* cos(std::size_t panel) const { return cos_.data() + panel * half_ * kPanelTokens; }
  const float* sin(std::size_t panel) const { return sin_.data() + panel * half_ * kPanelTokens; }
  std::size_t half() const { return half_; }
  const RopeTable& rope() const { return *rope_; }

 private:
  const RopeTable* rope_;
  std::size_t half_;
  AlignedVector<float> cos_, sin_;
};

class AgedKeys {
 public:
  explicit AgedKeys(const HeadView& view) : view_(&view) {}

  std::size_t size() const { return size_; }
  void clear() { size_ = rotated_ = 0; }
  /// Adds the key of the token at `position`, which is younger than all keys here.
  void append(std::uint32_t position);
  /// Removes the key of age `index`.
  void erase(std::size_t index);
  /// Multiplies up to four queries [dim] (null: no query) by all keys at their cache positions. The
  /// queries must be rotated to their cache positions. out [4][out_stride], out_stride at least
  /// size() rounded up to 32.
  void products(const float* const* queries, const CachePositionTable& positions_in_cache,
                float* out, std::size_t out_stride);

 private:
  float* row(std::size_t panel, std::size_t d) {
    return panels_.data() + (panel * view_->head_size + d) * kPanelTokens;
  }
  void rotate(const CachePositionTable& positions_in_cache);

  const HeadView* view_;
  // Number of keys. The oldest rotated_ of them are rotated to their current cache positions.
  std::size_t size_ = 0, rotated_ = 0;
  // [age / 32][dim][32]: the unrotated keys, and the keys rotated to cache positions.
  AlignedVector<float> panels_, rotated_panels_;
};

class AgedCache : public AgedSet {
 public:
  /// `tokens`: length of the sequence.
  AgedCache(const PolicySpec& spec, std::uint32_t budget, ProtectedTokens protected_tokens,
            Identity identity, std::uint32_t tokens)
      : AgedSet(spec, budget, protected_tokens, identity), bits_((tokens + 63) / 64) {}
  /// A cache that evicts by an oracle, which must outlive it.
  AgedCache(Oracle& oracle, std::uint32_t budget, Identity identity, std::uint32_t tokens)
      : AgedSet(oracle_ops(), oracle_params(oracle), budget, {}, identity),
        bits_((tokens + 63) / 64) {}

  /// Bit p: whether position p is live.
  const std::uint64_t* live_bits() const { return bits_.data(); }

  /// Returns the ages that the evicted tokens had before the eviction, ascending.
  std::span<const std::uint32_t> evict_to_budget(std::uint32_t now);
  void append(std::uint32_t first, std::uint32_t count, const float* feature_values = nullptr);

 private:
  std::vector<std::uint64_t> bits_;
};

}  // namespace kvlab
