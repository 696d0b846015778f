// The forward pass of one decoded token.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/cuda/batch_state.hpp"
#include "engine/cuda/cache/device_cache.hpp"
#include "engine/cuda/model/device_layers.hpp"

namespace kvlab {

/// The forward pass of one decoded token for each of the first rows of a batch. The arguments of
/// its launches do not change, so that a graph can contain them. The objects in `On` must outlive
/// this object and the graph.
class DecodeStep {
 public:
  struct On {
    const DeviceModel& model;
    DeviceLayers& layers;
    BatchState& batch;
    const DeviceCache& cache;
    const LayerOutputMemory& outputs;
    float* x;       // [row, hidden]
    float* logits;  // [row, vocab]
  };
  /// Whether the step samples and publishes the next token (`sampled`), or leaves the next token
  /// unchanged (`given`).
  enum class Next { sampled, given };
  DecodeStep(const On& on, int rows, Next next);

  void enqueue() const;

  /// One kind of launch of a step, over all layers, for benchmarks.
  struct Part {
    std::string name;
    std::uint64_t bytes;  ///< bytes that it has to move
    std::function<void()> enqueue;
  };
  /// The parts of a step. `live_bytes`: bytes of the rows' live keys and values. The step must
  /// outlive the parts.
  std::vector<Part> parts(std::uint64_t live_bytes) const;

 private:
  On on_;
  int rows_;
  Next next_;
  std::unique_ptr<const CacheStep> cache_;
};

}  // namespace kvlab
