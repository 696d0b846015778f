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

/// One decoded token for each of the first rows of a batch, through all layers. Nothing that it
/// works on changes once it is made, so that a graph can hold what it enqueues; all of that must
/// outlive it, and the graph.
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
  enum class Next { sampled, given };  ///< the token after it is published, or left as it is
  DecodeStep(const On& on, int rows, Next next);

  void enqueue() const;

  /// One kind of launch of a step, over all layers: for benchmarks.
  struct Part {
    std::string name;
    std::uint64_t bytes;  ///< that it has to move
    std::function<void()> enqueue;
  };
  /// `live_bytes`: of the rows' caches. The step must outlive them.
  std::vector<Part> parts(std::uint64_t live_bytes) const;

 private:
  On on_;
  int rows_;
  Next next_;
  std::unique_ptr<const CacheStep> cache_;
};

}  // namespace kvlab
