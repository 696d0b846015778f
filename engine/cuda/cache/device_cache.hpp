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
  std::uint32_t first = 0;  ///< of the admission's tokens
};

class DeviceCache {
 public:
  virtual ~DeviceCache() = default;

  // All of it is enqueued on the decoder's stream.

  /// What a row that has been fed so many tokens carries from step to step; 0: it is idle.
  virtual BatchState::Row row(std::uint32_t fed) const = 0;
  /// Throws std::invalid_argument where a sequence cannot hold `more` tokens beside those fed.
  virtual void refuse_beyond(std::uint32_t fed, std::uint64_t more) const = 0;

  /// A prompt is admitted so many tokens at a time; 0: as many as it has.
  virtual std::uint32_t admission_tokens(int sequence) const = 0;

  // An admission of many tokens: begin_admission; for each layer begin_layer, its parts (write,
  // attend), end_layer.
  virtual void begin_admission(int /*sequence*/, std::uint32_t /*fed*/, std::uint32_t /*tokens*/) {}
  virtual void begin_layer(std::uint32_t /*layer*/) {}
  /// Where a layer writes q, k and v, and how they are rotated; the rest of the arguments (qkv,
  /// norms, capture) is the caller's.
  virtual kernels::RopeWriteArgs prompt_write(std::uint32_t layer, const PromptPart& part) = 0;
  /// Behind the write of the same layer and tokens.
  virtual void attend_prompt(std::uint32_t layer, const PromptPart& part,
                             const LayerOutputs& to) = 0;
  virtual void end_layer(std::uint32_t /*layer*/) {}

  // A step of one token a sequence.
  virtual void begin_step(int /*rows*/) {}
  virtual kernels::RopeWriteArgs step_write(std::uint32_t layer, int rows) = 0;
  virtual void attend_step(std::uint32_t layer, int rows, const LayerOutputs& to) = 0;
  /// Behind the attention of a layer: what nobody waits for before the step's end, beside whatever
  /// comes next.
  virtual void observe_step() {}
  /// Behind all layers, and before anything that the next step changes: ends all of that.
  virtual void end_step() {}

  /// Keys and values of a sequence that has been fed so many tokens.
  virtual std::uint64_t live_bytes(int sequence, std::uint32_t fed) const = 0;
  /// How many have left for good, all layers and KV heads, when the last admission came behind so
  /// many tokens.
  virtual std::uint64_t evictions(int /*sequence*/, std::uint32_t /*behind*/) const { return 0; }
  /// Benchmarks: random keys and values instead of a prompt of so many tokens.
  virtual void pretend(int sequence, std::uint32_t tokens) = 0;
};

}  // namespace kvlab
