#include "traces/base/numeric/panels.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>

#include "traces/base/numeric/hot_loops.hpp"

namespace kvlab {
void Panels::Free::operator()(std::byte* data) const { std::free(data); }

Panels::Panels(std::size_t rows, std::size_t depth, Dtype dtype)
    : depth_(depth), dtype_(dtype == Dtype::bf16 ? Dtype::bf16 : Dtype::f32) {
  grow(rows);
}

Panels::Panels(const Panels& other) : depth_(other.depth_), dtype_(other.dtype_) {
  reserve(other.capacity_ * 16);
  rows_ = other.rows_;
  if (capacity_)
    std::memcpy(data_.get(), other.data_.get(), capacity_ * depth_ * 16 * bytes_of(dtype_));
}

void Panels::grow(std::size_t rows) {
  if (rows > capacity_ * 16) reserve(std::max(rows, (capacity_ + capacity_ / 2) * 16));
  rows_ = std::max(rows_, rows);
}

void Panels::reserve(std::size_t rows) {
  const std::size_t wanted = (rows + 15) / 16, panel_bytes = depth_ * 16 * bytes_of(dtype_);
  if (wanted <= capacity_) return;
  std::unique_ptr<std::byte, Free> data(static_cast<std::byte*>(
      std::aligned_alloc(64, std::max<std::size_t>(64, (wanted * panel_bytes + 63) / 64 * 64))));
  if (!data) throw std::bad_alloc();
  if (capacity_) std::memcpy(data.get(), data_.get(), capacity_ * panel_bytes);
  std::memset(data.get() + capacity_ * panel_bytes, 0, (wanted - capacity_) * panel_bytes);
  data_ = std::move(data);
  capacity_ = wanted;
}

void Panels::set_row(std::size_t row, const float* values) {
  const std::size_t base = row / 16 * depth_ * 16 + row % 16;
  if (dtype_ == Dtype::f32) {
    auto* data = reinterpret_cast<float*>(data_.get());
    for (std::size_t k = 0; k < depth_; ++k) data[base + 16 * k] = values[k];
  } else {
    auto* data = reinterpret_cast<std::uint16_t*>(data_.get());
    for (std::size_t k = 0; k < depth_; ++k) data[base + 16 * k] = float_to_bf16(values[k]);
  }
}

void Panels::get_row(std::size_t row, float* values) const {
  const std::size_t base = row / 16 * depth_ * 16 + row % 16;
  if (dtype_ == Dtype::f32) {
    const auto* data = reinterpret_cast<const float*>(data_.get());
    for (std::size_t k = 0; k < depth_; ++k) values[k] = data[base + 16 * k];
  } else {
    const auto* data = reinterpret_cast<const std::uint16_t*>(data_.get());
    for (std::size_t k = 0; k < depth_; ++k) values[k] = bf16_to_float(data[base + 16 * k]);
  }
}

void multiply_fused(const float* x, std::size_t m, std::size_t x_stride, const Panels& w,
                    std::size_t first, std::size_t last, float* y, std::size_t y_stride) {
  if (first >= last) return;
  hot_loops().multiply_fused(x, m, x_stride, reinterpret_cast<const float*>(w.panel(first)),
                             w.depth(), last - first, y, y_stride);
}

void multiply(const float* x, std::size_t m, std::size_t x_stride, const Panels& w,
              std::size_t first, std::size_t last, float* y, std::size_t y_stride) {
  if (first >= last) return;
  const HotLoops& loops = hot_loops();
  if (w.dtype() == Dtype::bf16)
    loops.multiply_bf16(x, m, x_stride, reinterpret_cast<const std::uint16_t*>(w.panel(first)),
                        w.depth(), last - first, y, y_stride);
  else
    loops.multiply_float(x, m, x_stride, reinterpret_cast<const float*>(w.panel(first)), w.depth(),
                         last - first, y, y_stride);
}

float dot_fused(const float* a, const float* b, std::size_t depth) {
  float sum = 0;
  for (std::size_t k = 0; k < depth; ++k) sum = std::fma(a[k], b[k], sum);
  return sum;
}

void accumulate_rows(std::span<const float> p, std::span<const std::uint32_t> rows, const float* v,
                     std::size_t stride, std::size_t depth, float* y) {
  hot_loops().accumulate(p.data(), rows.empty() ? nullptr : rows.data(), p.size(), v, stride, depth,
                         y);
}

}  // namespace kvlab
