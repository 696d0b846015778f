// Dense matrix products. Every element is one sum in index order, so results do not depend on the
// batch size.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "traces/base/numeric/dtype.hpp"

namespace kvlab {

/// A matrix [rows, depth], stored as panels of 16 rows: [rows / 16, depth, 16]. The last panel is
/// padded with zeros. Elements are float32 or bf16; f16 is stored as float32.
class Panels {
 public:
  Panels() = default;
  Panels(std::size_t rows, std::size_t depth, Dtype dtype = Dtype::f32);
  Panels(const Panels& other);
  Panels(Panels&&) = default;
  Panels& operator=(const Panels&) = delete;
  Panels& operator=(Panels&&) = default;
  ~Panels() = default;

  std::size_t rows() const { return rows_; }
  std::size_t depth() const { return depth_; }
  std::size_t panel_count() const { return (rows_ + 15) / 16; }
  Dtype dtype() const { return dtype_; }
  const std::byte* panel(std::size_t index) const {
    return data_.get() + index * depth_ * 16 * bytes_of(dtype_);
  }

  /// Writes one row of `depth` floats; rounds if the panels are bf16.
  void set_row(std::size_t row, const float* values);
  void get_row(std::size_t row, float* values) const;
  /// Grows to `rows` rows and keeps the contents. Each new allocation is at least 1.5 times the
  /// previous capacity.
  void grow(std::size_t rows);
  /// If the capacity is below `rows` rows, makes it exactly `rows` rows, rounded up to whole
  /// panels.
  void reserve(std::size_t rows);
  /// Number of allocated bytes.
  std::size_t bytes() const { return capacity_ * depth_ * 16 * bytes_of(dtype_); }

 private:
  struct Free {
    void operator()(std::byte* data) const;
  };
  std::size_t rows_ = 0, depth_ = 0, capacity_ = 0;  // capacity_ is in panels
  Dtype dtype_ = Dtype::f32;
  std::unique_ptr<std::byte, Free> data_;
};

/// y[i, 16 * (p - first) + r] = sum over k of x[i, k] * w[16 * p + r, k], for i < m and for the
/// panels p in [first, last). Rows of x and y are `x_stride` and `y_stride` floats apart; y holds
/// whole panels.
void multiply(const float* x, std::size_t m, std::size_t x_stride, const Panels& w,
              std::size_t first, std::size_t last, float* y, std::size_t y_stride);

/// multiply() by float32 panels, where each element is one chain of fused multiply-adds in index
/// order. Replay and decoder compute attention logits with it. (Products of bf16 or f16 values are
/// exact in float32, so fusing changes nothing for them.)
void multiply_fused(const float* x, std::size_t m, std::size_t x_stride, const Panels& w,
                    std::size_t first, std::size_t last, float* y, std::size_t y_stride);

/// The dot product of two vectors, by the same chain of fused multiply-adds.
float dot_fused(const float* a, const float* b, std::size_t depth);

/// y[d] += sum over i of p[i] * v[rows[i] * stride + d], in the order of i: the product of
/// attention probabilities with values. `rows` empty: rows 0, 1, 2, …
void accumulate_rows(std::span<const float> p, std::span<const std::uint32_t> rows, const float* v,
                     std::size_t stride, std::size_t depth, float* y);

}  // namespace kvlab
