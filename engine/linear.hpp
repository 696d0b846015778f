// A linear layer: weights in panels, an optional bias, computed in tiles by several threads.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "traces/base/numeric/panels.hpp"

namespace kvlab {

struct Linear {
  Panels weight;            // [outputs, inputs]
  std::vector<float> bias;  // [outputs], or empty
};

/// A part of the product of some rows of x by some panels of a weight.
struct Tile {
  std::size_t first_row, rows;
  std::size_t first_panel, panels;  ///< of 16 outputs each
  std::size_t first_output() const { return first_panel * 16; }
};

inline constexpr std::size_t kTileRows = 48, kTilePanels = 16;
/// Room for the product of a tile: [kTileRows, kTileColumns].
inline constexpr std::size_t kTileColumns = kTilePanels * 16;

/// Calls body(tile) for all tiles of [n, inputs] x [outputs, inputs]; little work stays on the
/// calling thread. How the work is cut does not change any result.
void for_tiles(std::size_t n, const Panels& weight, unsigned threads,
               const std::function<void(const Tile&)>& body);

/// The product of a tile with its bias, to y [rows, kTileColumns]; x [n, inputs].
void tile_product(const Linear& layer, const float* x, const Tile& tile, float* y);

/// y = x W^T + bias, or y += that; x [n, inputs], y [n, outputs].
void apply(const Linear& layer, const float* x, std::size_t n, float* y, unsigned threads);
void apply_and_add(const Linear& layer, const float* x, std::size_t n, float* y, unsigned threads);

/// body(first, count) for blocks of n rows, where a row takes `work` multiplications or so.
void for_rows(std::size_t n, std::size_t work, unsigned threads,
              const std::function<void(std::size_t first, std::size_t count)>& body);

}  // namespace kvlab
