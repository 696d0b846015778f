// The source of the hot loops. One source file per instruction set includes it. Everything is in an
// unnamed namespace and no inline function of the standard library is used, so the linker cannot
// mix the instruction sets.
#pragma once

#include "traces/base/numeric/exponential.hpp"
#include "traces/base/numeric/hot_loops.hpp"
#include "traces/base/numeric/vectors.hpp"

namespace kvlab {
namespace {

// Number of registers for the sixteen rows of a panel.
constexpr int kParts = static_cast<int>(kLanes) / kWidth;

// --- products ---------------------------------------------------------------------------------

constexpr int kRows = kWidth == 4 ? 2 : 6;  // x rows per block; their sums fill the registers
constexpr int kPanelsForTwo = kWidth == 4 ? 1 : 2, kPanelsForOne = kWidth == 4 ? 2 : 4;
constexpr std::size_t kDepthBlock = 256;  // 16 KiB of a panel, to stay in the L1 cache

/// Multiplies R rows of x by P panels, which are `panel_stride` elements apart. Running sums stay
/// in registers. With `carry`, the sums start from the values in y, otherwise from 0.
template <int R, int P, class Element>
inline __attribute__((always_inline)) void block(const float* x, std::size_t x_stride,
                                                 const Element* w, std::size_t panel_stride,
                                                 std::size_t depth, bool carry, float* y,
                                                 std::size_t y_stride) {
  constexpr int kColumns = P * kParts;
  Floats sum[R][kColumns] = {};
  if (carry)
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < kColumns; ++c) sum[r][c] = load(y + r * y_stride + c * kWidth);
  for (std::size_t k = 0; k < depth; ++k) {
    Floats column[kColumns];
    for (int c = 0; c < kColumns; ++c)
      column[c] = load(w + (c / kParts) * panel_stride + k * kLanes + (c % kParts) * kWidth);
    for (int r = 0; r < R; ++r) {
      const float factor = x[r * x_stride + k];
      for (int c = 0; c < kColumns; ++c) sum[r][c] += factor * column[c];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < kColumns; ++c) store(y + r * y_stride + c * kWidth, sum[r][c]);
}

/// Multiplies R rows of x by all panels.
template <int R, int P, class Element>
inline void few_rows(const float* x, std::size_t x_stride, const Element* w, std::size_t depth,
                     std::size_t panels, float* y, std::size_t y_stride) {
  const std::size_t panel_stride = depth * kLanes;
  std::size_t p = 0;
  for (; p + P <= panels; p += P)
    block<R, P>(x, x_stride, w + p * panel_stride, panel_stride, depth, false, y + p * kLanes,
                y_stride);
  for (; p < panels; ++p)
    block<R, 1>(x, x_stride, w + p * panel_stride, panel_stride, depth, false, y + p * kLanes,
                y_stride);
}

inline const float* widen(const float* from, std::size_t, float*) { return from; }
inline const float* widen(const std::uint16_t* from, std::size_t depth, float* scratch) {
  for (std::size_t i = 0; i < depth * kLanes; i += kWidth) store(scratch + i, load(from + i));
  return scratch;
}

/// Multiplies m rows of x by all panels; m is a multiple of kRows. The outer loop runs over blocks
/// of kDepthBlock columns of x, so all panels read the same columns in turn. Each block of a panel
/// is converted to float32 once and used for all rows.
template <class Element>
inline void many_rows(const float* x, std::size_t m, std::size_t x_stride, const Element* w,
                      std::size_t depth, std::size_t panels, float* y, std::size_t y_stride) {
  alignas(64) float scratch[kDepthBlock * kLanes];
  for (std::size_t k = 0; k == 0 || k < depth; k += kDepthBlock) {
    const std::size_t size = depth - k < kDepthBlock ? depth - k : kDepthBlock;
    for (std::size_t p = 0; p < panels; ++p) {
      const float* part = widen(w + (p * depth + k) * kLanes, size, scratch);
      for (std::size_t i = 0; i < m; i += kRows)
        block<kRows, 1>(x + i * x_stride + k, x_stride, part, 0, size, k > 0,
                        y + i * y_stride + p * kLanes, y_stride);
    }
  }
}

template <class Element>
void multiply_panels(const float* x, std::size_t m, std::size_t x_stride, const Element* w,
                     std::size_t depth, std::size_t panels, float* y, std::size_t y_stride) {
  std::size_t i = m / kRows * kRows;
  if (i > 0) many_rows(x, i, x_stride, w, depth, panels, y, y_stride);
  for (; i + 2 <= m; i += 2)
    few_rows<2, kPanelsForTwo>(x + i * x_stride, x_stride, w, depth, panels, y + i * y_stride,
                               y_stride);
  if (i < m)
    few_rows<1, kPanelsForOne>(x + i * x_stride, x_stride, w, depth, panels, y + i * y_stride,
                               y_stride);
}

// --- fused products ---------------------------------------------------------------------------

constexpr int kFusedRows = kWidth == 16 ? 8 : 6, kFusedPanels = kWidth == 16 ? 3 : 1;

/// Multiplies R rows of x by P panels, as block() does, with fused multiply-adds.
template <int R, int P>
inline __attribute__((always_inline)) void fused_block(const float* x, std::size_t x_stride,
                                                       const float* w, std::size_t depth, float* y,
                                                       std::size_t y_stride) {
  constexpr int kColumns = P * kParts;
  Floats sum[R][kColumns] = {};
  for (std::size_t k = 0; k < depth; ++k) {
    Floats column[kColumns];
    for (int c = 0; c < kColumns; ++c)
      column[c] = load(w + (c / kParts) * depth * kLanes + k * kLanes + (c % kParts) * kWidth);
    for (int r = 0; r < R; ++r) {
      const Floats factor = x[r * x_stride + k] - Floats{};  // broadcasts; adding 0 would lose -0
      for (int c = 0; c < kColumns; ++c) sum[r][c] = multiply_add(factor, column[c], sum[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < kColumns; ++c) store(y + r * y_stride + c * kWidth, sum[r][c]);
}

/// Multiplies all rows by P panels.
template <int P>
inline void fused_rows(const float* x, std::size_t m, std::size_t x_stride, const float* w,
                       std::size_t depth, float* y, std::size_t y_stride) {
  std::size_t i = 0;
  for (; i + kFusedRows <= m; i += kFusedRows)
    fused_block<kFusedRows, P>(x + i * x_stride, x_stride, w, depth, y + i * y_stride, y_stride);
  for (; i + 4 <= m; i += 4)
    fused_block<4, P>(x + i * x_stride, x_stride, w, depth, y + i * y_stride, y_stride);
  for (; i + 2 <= m; i += 2)
    fused_block<2, P>(x + i * x_stride, x_stride, w, depth, y + i * y_stride, y_stride);
  if (i < m) fused_block<1, P>(x + i * x_stride, x_stride, w, depth, y + i * y_stride, y_stride);
}

void multiply_fused(const float* x, std::size_t m, std::size_t x_stride, const float* w,
                    std::size_t depth, std::size_t panels, float* y, std::size_t y_stride) {
  std::size_t p = 0;
  for (; p + kFusedPanels <= panels; p += kFusedPanels)
    fused_rows<kFusedPanels>(x, m, x_stride, w + p * depth * kLanes, depth, y + p * kLanes,
                             y_stride);
  for (; p < panels; ++p)
    fused_rows<1>(x, m, x_stride, w + p * depth * kLanes, depth, y + p * kLanes, y_stride);
}

void accumulate(const float* p, const std::uint32_t* rows, std::size_t count, const float* v,
                std::size_t stride, std::size_t depth, float* y) {
  constexpr std::size_t kSums = 4;
  std::size_t d = 0;
  for (; d + kSums * kWidth <= depth; d += kSums * kWidth) {
    Floats sum[kSums];
    for (std::size_t b = 0; b < kSums; ++b) sum[b] = load(y + d + b * kWidth);
    for (std::size_t i = 0; i < count; ++i) {
      const float* row = v + (rows ? rows[i] : i) * stride + d;
      for (std::size_t b = 0; b < kSums; ++b) sum[b] += p[i] * load(row + b * kWidth);
    }
    for (std::size_t b = 0; b < kSums; ++b) store(y + d + b * kWidth, sum[b]);
  }
  for (; d < depth; ++d) {
    float sum = y[d];
    for (std::size_t i = 0; i < count; ++i) sum += p[i] * v[(rows ? rows[i] : i) * stride + d];
    y[d] = sum;
  }
}

// --- exponentials -----------------------------------------------------------------------------

/// to[i] = f(from[i], other[i]), one register at a time; the last elements are padded to a
/// register.
template <class F>
inline __attribute__((always_inline)) void each(const float* from, const float* other,
                                                std::size_t count, float* to, F f) {
  std::size_t i = 0;
  for (; i + kWidth <= count; i += kWidth) store(to + i, f(load(from + i), load(other + i)));
  if (i == count) return;
  float a[kWidth] = {}, b[kWidth] = {};
  std::memcpy(a, from + i, (count - i) * sizeof(float));
  std::memcpy(b, other + i, (count - i) * sizeof(float));
  store(a, f(load(a), load(b)));
  std::memcpy(to + i, a, (count - i) * sizeof(float));
}

void exponentials(const float* s, std::size_t count, std::int32_t shift, float* e) {
  each(s, s, count, e, [shift](Floats a, Floats) { return exponential(a, shift); });
}

/// g / (1 + exp(-x)), computed from exp(-|x|), which cannot overflow.
inline Floats gated_by(Floats g, Floats x) {
  const Floats size = x < 0.0f ? -x : x;
  const Floats capped = size > 100.0f ? Floats{} + 100.0f : size;
  const Floats e = exponential(-capped, 0);
  return (x < 0.0f ? g * e : g) / (1.0f + e);
}

void silu_times(float* gate, const float* up, std::size_t count) {
  each(gate, up, count, gate, [](Floats g, Floats u) { return gated_by(g, g) * u; });
}

/// Uses (1 + tanh(x)) / 2 = 1 / (1 + exp(-2x)).
void gelu_times(float* gate, const float* up, std::size_t count) {
  constexpr float kTwice = 1.59576912160573f;  // 2 sqrt(2 / pi)
  each(gate, up, count, gate,
       [](Floats g, Floats u) { return gated_by(g, kTwice * (g + 0.044715f * g * g * g)) * u; });
}

// --- sums and scaling -------------------------------------------------------------------------

float largest(const float* s, std::size_t count) {
  float lanes[kLanes];
  for (std::size_t l = 0; l < kLanes; ++l) lanes[l] = -__builtin_inff();
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (std::size_t l = 0; l < kLanes; ++l) lanes[l] = s[i + l] > lanes[l] ? s[i + l] : lanes[l];
  for (std::size_t l = 0; i < count; ++i, ++l) lanes[l] = s[i] > lanes[l] ? s[i] : lanes[l];
  float maximum = lanes[0];
  for (std::size_t l = 1; l < kLanes; ++l) maximum = lanes[l] > maximum ? lanes[l] : maximum;
  return maximum;
}

template <class T>
inline T add_by_halves(T* lanes) {
  for (std::size_t width = kLanes / 2; width > 0; width /= 2)
    for (std::size_t l = 0; l < width; ++l) lanes[l] += lanes[l + width];
  return lanes[0];
}

float lane_sum(const float* x, std::size_t count) {
  float lanes[kLanes] = {};
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (std::size_t l = 0; l < kLanes; ++l) lanes[l] += x[i + l];
  for (std::size_t l = 0; i < count; ++i, ++l) lanes[l] += x[i];
  return add_by_halves(lanes);
}

double lane_sum_of_squares(const float* x, std::size_t count) {
  double lanes[kLanes] = {};
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (std::size_t l = 0; l < kLanes; ++l) {
      const double value = static_cast<double>(x[i + l]);
      lanes[l] += value * value;
    }
  for (std::size_t l = 0; i < count; ++i, ++l) {
    const double value = static_cast<double>(x[i]);
    lanes[l] += value * value;
  }
  return add_by_halves(lanes);
}

void divide(const float* x, std::size_t count, float divisor, float* y) {
  for (std::size_t i = 0; i < count; ++i) y[i] = x[i] / divisor;
}

void scale(float* x, std::size_t count, float factor) {
  for (std::size_t i = 0; i < count; ++i) x[i] *= factor;
}

void add(const float* x, std::size_t count, float* y) {
  for (std::size_t i = 0; i < count; ++i) y[i] += x[i];
}

void scale_by(const float* x, const float* weight, std::size_t count, float factor, float* y) {
  for (std::size_t i = 0; i < count; ++i) y[i] = x[i] * factor * weight[i];
}

constexpr HotLoops loops_named(const char* name) {
  return {.name = name,
          .multiply_float = multiply_panels<float>,
          .multiply_fused = multiply_fused,
          .multiply_bf16 = multiply_panels<std::uint16_t>,
          .accumulate = accumulate,
          .exponentials = exponentials,
          .largest = largest,
          .lane_sum = lane_sum,
          .lane_sum_of_squares = lane_sum_of_squares,
          .divide = divide,
          .scale = scale,
          .add = add,
          .scale_by = scale_by,
          .silu_times = silu_times,
          .gelu_times = gelu_times};
}

}  // namespace
}  // namespace kvlab
