// Operations on keys at cache positions, in panels of 32 keys: closing gaps, rotating, multiplying.
#pragma once

#include "sim/config_batches/loops/rows/head_groups.hpp"

namespace kvlab {
namespace {

constexpr int kPanelPieces = static_cast<int>(kPanelTokens) / kWidth;  // registers of a panel's row

/// Closes the gap at index `gap` of a panel: each later key moves down by one index, and the first
/// key of the panel `next` becomes the last one. If `next` is null, there is no next panel, and the
/// last key becomes 0.
void close_gap(float* panel, const float* next, std::size_t gap, std::size_t dim) {
  Ints moves[kPanelPieces];
  for (int c = 0; c < kPanelPieces; ++c)
    for (int l = 0; l < kWidth; ++l)
      moves[c][l] = static_cast<std::size_t>(c * kWidth + l) >= gap ? -1 : 0;
  for (std::size_t d = 0; d < dim; ++d) {
    float* const row = panel + d * kPanelTokens;
    for (int c = 0; c < kPanelPieces; ++c) {
      const Floats stays = load(row + c * kWidth), comes = load(row + c * kWidth + 1);
      store(row + c * kWidth, moves[c] ? comes : stays);
    }
    row[kPanelTokens - 1] = next ? next[d * kPanelTokens] : 0.0f;
  }
}

void rotate_panel(const float* panel, const float* cos, const float* sin, std::size_t half,
                  std::size_t dim, float* rotated) {
  for (std::size_t d = 0; d < half; ++d)
    for (std::size_t i = 0; i < kPanelTokens; i += kWidth) {
      const Floats a = load(panel + d * kPanelTokens + i),
                   b = load(panel + (d + half) * kPanelTokens + i);
      const Floats c = load(cos + d * kPanelTokens + i), s = load(sin + d * kPanelTokens + i);
      store(rotated + d * kPanelTokens + i, a * c - b * s);
      store(rotated + (d + half) * kPanelTokens + i, b * c + a * s);
    }
  for (std::size_t d = 2 * half; d < dim; ++d)
    std::memcpy(rotated + d * kPanelTokens, panel + d * kPanelTokens, kPanelTokens * sizeof(float));
}

/// Multiplies R queries by the keys of P panels. One dimension of a panel takes C registers.
template <int R, int P, int C>
inline __attribute__((always_inline)) void products_of(const float* keys, std::size_t dim,
                                                       const float* const* queries,
                                                       float* const* out) {
  Floats sum[R][P * C] = {};
  for (std::size_t d = 0; d < dim; ++d) {
    Floats column[P * C];
    for (int c = 0; c < P * C; ++c)
      column[c] = load(keys + ((c / C) * dim + d) * kPanelTokens + (c % C) * kWidth);
    for (int r = 0; r < R; ++r) {
      // Subtracting zero copies the scalar to all elements. Adding zero would change -0 to 0.
      const Floats factor = queries[r][d] - Floats{};
      for (int c = 0; c < P * C; ++c) sum[r][c] = multiply_add(factor, column[c], sum[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < P * C; ++c)
      store(out[r] + (c / C) * kPanelTokens + (c % C) * kWidth, sum[r][c]);
}

template <int R>
inline void all_products(const float* keys, std::size_t panels, std::size_t dim,
                         const float* const* queries, float* out, std::size_t out_stride) {
  constexpr int kColumns = kPanelPieces < 2 ? kPanelPieces : 2;
  std::size_t p = 0;
  float* to[R];
  const auto aim = [&](std::size_t i) {
    for (int r = 0; r < R; ++r) to[r] = out + static_cast<std::size_t>(r) * out_stride + i;
  };
  if constexpr (kPanelPieces == kColumns)
    for (; p + 2 <= panels; p += 2) {
      aim(p * kPanelTokens);
      products_of<R, 2, kColumns>(keys + p * dim * kPanelTokens, dim, queries, to);
    }
  for (; p < panels; ++p)
    for (std::size_t i = 0; i < kPanelTokens; i += kColumns * kWidth) {
      aim(p * kPanelTokens + i);
      products_of<R, 1, kColumns>(keys + p * dim * kPanelTokens + i, dim, queries, to);
    }
}

void panel_products(const float* keys, std::size_t panels, std::size_t dim,
                    const float* const* queries, float* out, std::size_t out_stride) {
  int count = 0;
  while (count < kHeads && queries[count]) ++count;
  if (count == 4) all_products<4>(keys, panels, dim, queries, out, out_stride);
  if (count == 3) all_products<3>(keys, panels, dim, queries, out, out_stride);
  if (count == 2) all_products<2>(keys, panels, dim, queries, out, out_stride);
  if (count == 1) all_products<1>(keys, panels, dim, queries, out, out_stride);
}

}  // namespace
}  // namespace kvlab
