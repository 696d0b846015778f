// Where keys and values live, and attention over them: what differs between the whole cache and one
// that evicts. The decoder drives it, for a prompt layer by layer, for a step from within a graph.
#pragma once

#include <cstdint>

#include "engine/cuda/batch_state.hpp"
#include "engine/cuda/capture_shape.hpp"
#include "kernels/pointwise.hpp"

namespace kvlab {

/// Some tokens of one sequence's admission that go through a layer together.
struct PromptPart {
  int sequence;
  std::uint32_t position;  ///< of the first of them
  int rows;
};

class DeviceCache {
 public:
  virtual ~DeviceCache() = default;

  // All of it is enqueued on the decoder's stream.

  /// Where a layer writes q, k and v, and how they are rotated; the rest of the arguments (qkv,
  /// norms, capture) is the caller's.
  virtual kernels::RopeWriteArgs prompt_write(std::uint32_t layer, const PromptPart& part) = 0;
  virtual kernels::RopeWriteArgs step_write(std::uint32_t layer, int rows) = 0;
  /// Behind the write of the same layer and tokens.
  virtual void attend_prompt(std::uint32_t layer, const PromptPart& part,
                             const LayerOutputs& to) = 0;
  virtual void attend_step(std::uint32_t layer, int rows, const LayerOutputs& to) = 0;
};

}  // namespace kvlab
