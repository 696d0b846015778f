// The angles by which a trace's layers turn queries and keys.
#pragma once

#include <map>

#include "traces/trace.hpp"

namespace kvlab {

/// One table for each rope that rows name.
class LayerRopes {
 public:
  explicit LayerRopes(const TraceReader& trace) {
    for (std::uint32_t layer = 0; layer < trace.shape().layers; ++layer)
      tables_.try_emplace(trace.row(layer).table, trace.row(layer).rope, trace.tokens());
    for (std::uint32_t layer = 0; layer < trace.shape().layers; ++layer)
      by_layer_.push_back(&tables_.at(trace.row(layer).table));
  }
  LayerRopes(const LayerRopes&) = delete;
  LayerRopes(LayerRopes&&) = default;

  const RopeTable& operator[](std::uint32_t layer) const { return *by_layer_[layer]; }

 private:
  std::map<std::uint32_t, RopeTable> tables_;
  std::vector<const RopeTable*> by_layer_;
};

}  // namespace kvlab
