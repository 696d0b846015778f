#include "traces/base/numeric/rope.hpp"

#include <algorithm>
#include <cmath>

namespace kvlab {

RopeTable::RopeTable(const Rope& rope, std::uint32_t count)
    : rope_(rope),
      positions_(count),
      half_(rope.inv_freq.size()),
      cos_(std::size_t{count} * half_),
      sin_(std::size_t{count} * half_) {
  for (std::uint32_t position = 0; position < count; ++position)
    for (std::size_t i = 0; i < half_; ++i) {
      const double angle = static_cast<double>(position) * static_cast<double>(rope.inv_freq[i]);
      cos_[position * half_ + i] = static_cast<float>(std::cos(angle)) * rope.factor;
      sin_[position * half_ + i] = static_cast<float>(std::sin(angle)) * rope.factor;
    }
}

void RopeTable::rotate(const float* x, std::size_t size, std::uint32_t position, float* y) const {
  const float* c = cos_.data() + position * half_;
  const float* s = sin_.data() + position * half_;
  for (std::size_t i = 0; i < half_; ++i) {
    const float a = x[i], b = x[i + half_];
    y[i] = a * c[i] - b * s[i];
    y[i + half_] = b * c[i] + a * s[i];
  }
  if (x != y) std::copy(x + 2 * half_, x + size, y + 2 * half_);
}

}  // namespace kvlab
