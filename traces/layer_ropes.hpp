// The RoPE tables of a trace's layers.
#pragma once

#include <map>

#include "traces/trace.hpp"

namespace kvlab {

/// Stores one table for each distinct RoPE in the layers' rows (RowSpec).
class LayerRopes {
 public:
  explicit LayerRopes(const TraceReader& trace) {
    for (std::uint32_t layer = 0; layer < trace.shape().layers; ++layer)
      add(trace.row(layer), trace.tokens());
  }
  LayerRopes(std::span<const RowSpec> rows, std::uint32_t tokens) {
    for (const RowSpec& row : rows) add(row, tokens);
  }
  LayerRopes(const LayerRopes&) = delete;
  LayerRopes(LayerRopes&&) = default;

  const RopeTable& operator[](std::uint32_t layer) const { return *by_layer_[layer]; }

 private:
  void add(const RowSpec& row, std::uint32_t tokens) {
    by_layer_.push_back(&tables_.try_emplace(row.table, row.rope, tokens).first->second);
  }

  std::map<std::uint32_t, RopeTable> tables_;
  std::vector<const RopeTable*> by_layer_;
};

}  // namespace kvlab
