#include "sim/config_batches/feedback/aged_cache.hpp"

#include <algorithm>

namespace kvlab {

CachePositionTable::CachePositionTable(const RopeTable& rope, std::size_t half)
    : rope_(&rope),
      half_(half),
      cos_((rope.positions() / kPanelTokens + 1) * half * kPanelTokens),
      sin_(cos_.size()) {
  for (std::uint32_t position_in_cache = 0; position_in_cache < rope.positions();
       ++position_in_cache) {
    const auto c = rope.cosines(position_in_cache), s = rope.sines(position_in_cache);
    const std::size_t panel = position_in_cache / kPanelTokens,
                      i = position_in_cache % kPanelTokens;
    for (std::size_t d = 0; d < half; ++d) {
      cos_[(panel * half + d) * kPanelTokens + i] = c[d];
      sin_[(panel * half + d) * kPanelTokens + i] = s[d];
    }
  }
}

void AgedKeys::append(std::uint32_t position) {
  const std::size_t dim = view_->head_size, panel = size_ / kPanelTokens;
  if (panels_.size() < (panel + 1) * dim * kPanelTokens + 1)
    panels_.resize((panel + 1) * dim * kPanelTokens + 1);
  const float* const key = view_->key(position);
  for (std::size_t d = 0; d < dim; ++d) row(panel, d)[size_ % kPanelTokens] = key[d];
  ++size_;
}

void AgedKeys::erase(std::size_t index) {
  const std::size_t dim = view_->head_size, last = (size_ - 1) / kPanelTokens;
  for (std::size_t panel = index / kPanelTokens; panel <= last; ++panel)
    row_loops().close_gap(row(panel, 0), panel < last ? row(panel + 1, 0) : nullptr,
                          panel == index / kPanelTokens ? index % kPanelTokens : 0, dim);
  --size_;
  rotated_ = std::min(rotated_, index);
}

/// Rotates the panels that contain new keys, or keys whose position has changed.
void AgedKeys::rotate(const CachePositionTable& positions_in_cache) {
  const std::size_t dim = view_->head_size;
  rotated_panels_.resize(panels_.size());
  if (rotated_ == size_) return;
  for (std::size_t panel = rotated_ / kPanelTokens; panel * kPanelTokens < size_; ++panel)
    row_loops().rotate_panel(row(panel, 0), positions_in_cache.cos(panel),
                             positions_in_cache.sin(panel), positions_in_cache.half(), dim,
                             rotated_panels_.data() + panel * dim * kPanelTokens);
  rotated_ = size_;
}

void AgedKeys::products(const float* const* queries, const CachePositionTable& positions_in_cache,
                        float* out, std::size_t out_stride) {
  rotate(positions_in_cache);
  row_loops().panel_products(rotated_panels_.data(), (size_ + kPanelTokens - 1) / kPanelTokens,
                             view_->head_size, queries, out, out_stride);
}

std::span<const std::uint32_t> AgedCache::evict_to_budget(std::uint32_t now) {
  const auto victims = choose_victims(now);
  for (const std::uint32_t age : victims) {
    const std::uint32_t position = positions()[age];
    bits_[position / 64] &= ~(std::uint64_t{1} << position % 64);
  }
  evict(victims);
  return victims;
}

void AgedCache::append(std::uint32_t first, std::uint32_t count, const float* feature_values) {
  AgedSet::append(first, count, feature_values);
  for (std::uint32_t position = first; position < first + count; ++position)
    bits_[position / 64] |= std::uint64_t{1} << position % 64;
}

}  // namespace kvlab
