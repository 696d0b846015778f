// A linear layer: weights in panels and an optional bias. Several threads compute it tile by tile.
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

/// A tile of a product: some rows of x times some panels of a weight.
struct Tile {
  std::size_t first_row, rows;
  std::size_t first_panel, panels;  ///< of 16 outputs each
  std::size_t first_output() const { return first_panel * 16; }
};

inline constexpr std::size_t kTileRows = 48, kTilePanels = 16;
/// The product of a tile is at most [kTileRows, kTileColumns].
inline constexpr std::size_t kTileColumns = kTilePanels * 16;

/// Calls body(tile) for all tiles of [n, inputs] x [outputs, inputs]. Small products stay on the
/// calling thread. The result does not depend on how the work is divided.
void for_tiles(std::size_t n, const Panels& weight, unsigned threads,
               const std::function<void(const Tile&)>& body);

/// Computes one tile of x W^T + bias, where x is [n, inputs]. Writes it to y [tile.rows,
/// kTileColumns].
void tile_product(const Linear& layer, const float* x, const Tile& tile, float* y);

/// apply() computes y = x W^T + bias, and apply_and_add() computes y += x W^T + bias. x is [n,
/// inputs], and y is [n, outputs].
void apply(const Linear& layer, const float* x, std::size_t n, float* y, unsigned threads);
void apply_and_add(const Linear& layer, const float* x, std::size_t n, float* y, unsigned threads);

/// Divides n rows into blocks and calls body(first row, number of rows) for each, on several
/// threads. `work` is the approximate number of multiplications for one row.
void for_rows(std::size_t n, std::size_t work, unsigned threads,
              const std::function<void(std::size_t first, std::size_t count)>& body);

}  // namespace kvlab
