#include "traces/numeric/panels.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "traces/numeric/vector.hpp"

namespace kvlab {
namespace {

struct LoadFloat {
  using Element = float;
  static inline __attribute__((always_inline)) Float16 load(const float* from) {
    Float16 v;
    std::memcpy(&v, from, sizeof v);
    return v;
  }
};

struct LoadBf16 {
  using Element = std::uint16_t;
  static inline __attribute__((always_inline)) Float16 load(const std::uint16_t* from) {
    typedef std::uint16_t Half16 __attribute__((vector_size(32)));
    typedef std::uint32_t Word16 __attribute__((vector_size(64)));
    Half16 half;
    std::memcpy(&half, from, sizeof half);
    const Word16 word = __builtin_convertvector(half, Word16) << 16;
    Float16 v;
    std::memcpy(&v, &word, sizeof v);
    return v;
  }
};

/// R rows of x by P panels at once: R * P running sums stay in registers.
template <class Load, int R, int P>
inline __attribute__((always_inline)) void block(const float* x, std::size_t x_stride,
                                                 const typename Load::Element* w, std::size_t depth,
                                                 float* y, std::size_t y_stride) {
  Float16 sum[R][P] = {};
  for (std::size_t k = 0; k < depth; ++k) {
    Float16 column[P];
    for (int p = 0; p < P; ++p)
      column[p] = Load::load(w + (static_cast<std::size_t>(p) * depth + k) * 16);
    for (int r = 0; r < R; ++r) {
      const float scale = x[static_cast<std::size_t>(r) * x_stride + k];
      for (int p = 0; p < P; ++p) sum[r][p] += scale * column[p];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p)
      std::memcpy(y + static_cast<std::size_t>(r) * y_stride + static_cast<std::size_t>(p) * 16,
                  &sum[r][p], sizeof(Float16));
}

template <class Load, int R, int P>
inline __attribute__((always_inline)) void all_panels(const float* x, std::size_t x_stride,
                                                      const typename Load::Element* w,
                                                      std::size_t depth, std::size_t count,
                                                      float* y, std::size_t y_stride) {
  std::size_t p = 0;
  for (; p + P <= count; p += P)
    block<Load, R, P>(x, x_stride, w + p * depth * 16, depth, y + p * 16, y_stride);
  for (; p < count; ++p)
    block<Load, R, 1>(x, x_stride, w + p * depth * 16, depth, y + p * 16, y_stride);
}

template <class Load>
inline __attribute__((always_inline)) void multiply_panels(const float* x, std::size_t m,
                                                           std::size_t x_stride,
                                                           const typename Load::Element* w,
                                                           std::size_t depth, std::size_t count,
                                                           float* y, std::size_t y_stride) {
  std::size_t i = 0;
  for (; i + 6 <= m; i += 6)
    all_panels<Load, 6, 1>(x + i * x_stride, x_stride, w, depth, count, y + i * y_stride, y_stride);
  for (; i + 2 <= m; i += 2)
    all_panels<Load, 2, 2>(x + i * x_stride, x_stride, w, depth, count, y + i * y_stride, y_stride);
  if (i < m)
    all_panels<Load, 1, 4>(x + i * x_stride, x_stride, w, depth, count, y + i * y_stride, y_stride);
}

KVLAB_HOT void multiply_float(const float* x, std::size_t m, std::size_t x_stride, const float* w,
                              std::size_t depth, std::size_t count, float* y,
                              std::size_t y_stride) {
  multiply_panels<LoadFloat>(x, m, x_stride, w, depth, count, y, y_stride);
}

KVLAB_HOT void multiply_bf16(const float* x, std::size_t m, std::size_t x_stride,
                             const std::uint16_t* w, std::size_t depth, std::size_t count, float* y,
                             std::size_t y_stride) {
  multiply_panels<LoadBf16>(x, m, x_stride, w, depth, count, y, y_stride);
}

KVLAB_HOT void accumulate(const float* p, const std::uint32_t* rows, std::size_t count,
                          const float* v, std::size_t stride, std::size_t depth, float* y) {
  std::size_t d = 0;
  for (; d + 64 <= depth; d += 64) {
    Float16 sum[4];
    std::memcpy(sum, y + d, sizeof sum);
    for (std::size_t i = 0; i < count; ++i) {
      const float* row = v + (rows ? rows[i] : i) * stride + d;
      for (int b = 0; b < 4; ++b) sum[b] += p[i] * LoadFloat::load(row + 16 * b);
    }
    std::memcpy(y + d, sum, sizeof sum);
  }
  for (; d < depth; ++d) {
    float sum = y[d];
    for (std::size_t i = 0; i < count; ++i) sum += p[i] * v[(rows ? rows[i] : i) * stride + d];
    y[d] = sum;
  }
}

}  // namespace

void Panels::Free::operator()(std::byte* data) const { std::free(data); }

Panels::Panels(std::size_t rows, std::size_t depth, Dtype dtype)
    : depth_(depth), dtype_(dtype == Dtype::bf16 ? Dtype::bf16 : Dtype::f32) {
  grow(rows);
}

void Panels::grow(std::size_t rows) {
  const std::size_t panels = (rows + 15) / 16, panel_bytes = depth_ * 16 * bytes_of(dtype_);
  if (panels > capacity_) {
    const std::size_t wanted = std::max(panels, capacity_ + capacity_ / 2);
    std::unique_ptr<std::byte, Free> data(static_cast<std::byte*>(
        std::aligned_alloc(64, std::max<std::size_t>(64, (wanted * panel_bytes + 63) / 64 * 64))));
    if (!data) throw std::bad_alloc();
    if (capacity_) std::memcpy(data.get(), data_.get(), capacity_ * panel_bytes);
    std::memset(data.get() + capacity_ * panel_bytes, 0, (wanted - capacity_) * panel_bytes);
    data_ = std::move(data);
    capacity_ = wanted;
  }
  rows_ = std::max(rows_, rows);
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

void multiply(const float* x, std::size_t m, std::size_t x_stride, const Panels& w,
              std::size_t first, std::size_t last, float* y, std::size_t y_stride) {
  if (first >= last) return;
  if (w.dtype() == Dtype::bf16)
    multiply_bf16(x, m, x_stride, reinterpret_cast<const std::uint16_t*>(w.panel(first)), w.depth(),
                  last - first, y + first * 16, y_stride);
  else
    multiply_float(x, m, x_stride, reinterpret_cast<const float*>(w.panel(first)), w.depth(),
                   last - first, y + first * 16, y_stride);
}

float dot(const float* a, const float* b, std::size_t depth) {
  float sum = 0;
  for (std::size_t k = 0; k < depth; ++k) sum += a[k] * b[k];
  return sum;
}

void accumulate_rows(std::span<const float> p, std::span<const std::uint32_t> rows, const float* v,
                     std::size_t stride, std::size_t depth, float* y) {
  accumulate(p.data(), rows.empty() ? nullptr : rows.data(), p.size(), v, stride, depth, y);
}

}  // namespace kvlab
