// Keys of a cache whose live tokens are numbered by age at every step, for the tokens that have
// lost a younger one: each is turned to its present place when it is read, from its unrotated self.
//
// (A token that has lost no younger one keeps its true position; its logits come from rows that all
// configurations share.)
#pragma once

#include <cstdint>
#include <vector>

#include "sim/lanes/group_rows.hpp"

namespace kvlab {

/// cos and sin by place, such that any 32 places in a row lie in a row of memory:
/// [place / 32][half][64].
class PlaceTable {
 public:
  PlaceTable(const RopeTable& rope, std::size_t half);
  static constexpr std::size_t kStride = 2 * kPanelTokens;
  const float* cos(std::uint32_t place) const { return at(cos_, place); }
  const float* sin(std::uint32_t place) const { return at(sin_, place); }
  std::size_t half() const { return half_; }

 private:
  const float* at(const std::vector<float>& table, std::uint32_t place) const {
    return table.data() + place / kPanelTokens * half_ * kStride + place % kPanelTokens;
  }
  std::size_t half_;
  std::vector<float> cos_, sin_;
};

class AgedKeys {
 public:
  explicit AgedKeys(const HeadView& view) : view_(&view) {}

  std::size_t size() const { return size_; }
  void clear() { size_ = 0; }
  /// Adds the key of the token at `position`: the youngest here.
  void append(std::uint32_t position);
  /// Takes the key of age `index` out.
  void erase(std::size_t index);
  /// Products of the quad's queries with all keys, turned to places first_place, first_place + 1, …
  /// out [4][out_stride], out_stride at least size() rounded up to 32.
  void products(const float* const* queries, std::uint32_t first_place, const PlaceTable& places,
                float* out, std::size_t out_stride);

 private:
  float* row(std::size_t panel, std::size_t d) {
    return panels_.data() + (panel * view_->head_size + d) * kPanelTokens;
  }

  const HeadView* view_;
  std::size_t size_ = 0;
  std::vector<float> panels_;  // [age / 32][dim][32], unrotated
  std::vector<float> turned_;
};

}  // namespace kvlab
