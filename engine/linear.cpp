#include "engine/linear.hpp"

#include <algorithm>

#include "traces/base/numeric/elementwise.hpp"
#include "traces/base/parallel.hpp"

namespace kvlab {
namespace {

// Below this number of multiplications, waking a thread costs more than it saves.
constexpr std::size_t kWorthThreads = 1 << 19;

/// Number of a tile's columns that are outputs. The other columns of the last panel are padding.
std::size_t columns_of(const Tile& tile, const Panels& weight) {
  return std::min(tile.panels * 16, weight.rows() - tile.first_output());
}

template <class Finish>
void apply_tiles(const Linear& layer, const float* x, std::size_t n, unsigned threads,
                 Finish finish) {
  const std::size_t outputs = layer.weight.rows();
  for_tiles(n, layer.weight, threads, [&](const Tile& tile) {
    alignas(64) float y[kTileRows * kTileColumns];
    tile_product(layer, x, tile, y);
    for (std::size_t r = 0; r < tile.rows; ++r)
      finish(y + r * kTileColumns, columns_of(tile, layer.weight),
             (tile.first_row + r) * outputs + tile.first_output());
  });
}

}  // namespace

void for_tiles(std::size_t n, const Panels& weight, unsigned threads,
               const std::function<void(const Tile&)>& body) {
  const std::size_t row_tiles = (n + kTileRows - 1) / kTileRows;
  const std::size_t panel_tiles = (weight.panel_count() + kTilePanels - 1) / kTilePanels;
  const bool worth = n * weight.rows() * weight.depth() >= kWorthThreads;
  // Tiles with the same panels are consecutive, so that the panels stay in the CPU caches.
  parallel_for(row_tiles * panel_tiles, worth ? threads : 1, [&](std::size_t item) {
    const std::size_t row = item % row_tiles * kTileRows, panel = item / row_tiles * kTilePanels;
    body({.first_row = row,
          .rows = std::min(kTileRows, n - row),
          .first_panel = panel,
          .panels = std::min(kTilePanels, weight.panel_count() - panel)});
  });
}

void tile_product(const Linear& layer, const float* x, const Tile& tile, float* y) {
  const std::size_t inputs = layer.weight.depth();
  multiply(x + tile.first_row * inputs, tile.rows, inputs, layer.weight, tile.first_panel,
           tile.first_panel + tile.panels, y, kTileColumns);
  if (layer.bias.empty()) return;
  for (std::size_t r = 0; r < tile.rows; ++r)
    add(layer.bias.data() + tile.first_output(), columns_of(tile, layer.weight),
        y + r * kTileColumns);
}

void apply(const Linear& layer, const float* x, std::size_t n, float* y, unsigned threads) {
  apply_tiles(layer, x, n, threads, [y](const float* from, std::size_t count, std::size_t at) {
    std::copy_n(from, count, y + at);
  });
}

void apply_and_add(const Linear& layer, const float* x, std::size_t n, float* y, unsigned threads) {
  apply_tiles(layer, x, n, threads, [y](const float* from, std::size_t count, std::size_t at) {
    add(from, count, y + at);
  });
}

void for_rows(std::size_t n, std::size_t work, unsigned threads,
              const std::function<void(std::size_t first, std::size_t count)>& body) {
  const std::size_t block = std::clamp<std::size_t>(kWorthThreads / std::max<std::size_t>(work, 1),
                                                    1, std::max<std::size_t>(n, 1));
  parallel_for((n + block - 1) / block, threads,
               [&](std::size_t item) { body(item * block, std::min(block, n - item * block)); });
}

}  // namespace kvlab
