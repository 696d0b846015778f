#include "sim/lanes/aged_keys.hpp"

#include <algorithm>
#include <cstring>

namespace kvlab {

PlaceTable::PlaceTable(const RopeTable& rope, std::size_t half)
    : half_(half), cos_((rope.positions() / kPanelTokens + 1) * half * kStride), sin_(cos_.size()) {
  for (std::uint32_t place = 0; place < rope.positions(); ++place) {
    const auto c = rope.cosines(place), s = rope.sines(place);
    const std::size_t block = place / kPanelTokens, i = place % kPanelTokens;
    for (std::size_t d = 0; d < half; ++d) {
      cos_[(block * half + d) * kStride + i] = c[d];
      sin_[(block * half + d) * kStride + i] = s[d];
      if (block == 0) continue;  // the second half of the row before
      cos_[((block - 1) * half + d) * kStride + kPanelTokens + i] = c[d];
      sin_[((block - 1) * half + d) * kStride + kPanelTokens + i] = s[d];
    }
  }
}

void AgedKeys::append(std::uint32_t position) {
  const std::size_t dim = view_->head_size, panel = size_ / kPanelTokens;
  if (panels_.size() < (panel + 1) * dim * kPanelTokens)
    panels_.resize((panel + 1) * dim * kPanelTokens);
  const float* const key = view_->key(position);
  for (std::size_t d = 0; d < dim; ++d) row(panel, d)[size_ % kPanelTokens] = key[d];
  ++size_;
}

void AgedKeys::erase(std::size_t index) {
  const std::size_t dim = view_->head_size, last = (size_ - 1) / kPanelTokens;
  for (std::size_t panel = index / kPanelTokens; panel <= last; ++panel) {
    const std::size_t from = panel == index / kPanelTokens ? index % kPanelTokens : 0;
    for (std::size_t d = 0; d < dim; ++d) {
      float* const keys = row(panel, d);
      std::memmove(keys + from, keys + from + 1, (kPanelTokens - 1 - from) * sizeof(float));
      if (panel < last) keys[kPanelTokens - 1] = row(panel + 1, d)[0];
    }
  }
  --size_;
}

void AgedKeys::products(const float* const* queries, std::uint32_t first_place,
                        const PlaceTable& places, float* out, std::size_t out_stride) {
  const std::size_t dim = view_->head_size;
  turned_.resize(dim * kPanelTokens);
  for (std::size_t first = 0; first < size_; first += kPanelTokens) {
    const auto place = static_cast<std::uint32_t>(first_place + first);
    row_loops().rotated_products(panels_.data() + first * dim, places.cos(place), places.sin(place),
                                 PlaceTable::kStride, places.half(), dim, queries, turned_.data(),
                                 out + first, out_stride);
  }
}

}  // namespace kvlab
