// Where each layer of an admission puts what the next launches need, and what a capture keeps.
#pragma once

#include <cstdint>

#include "engine/cuda/memory.hpp"
#include "engine/model.hpp"

namespace kvlab {

/// What a captured admission left in device memory, layer by layer: `layers` of these after each
/// other, each `tokens` long.
struct CaptureShape {
  Dtype dtype;
  std::uint32_t layers, query_heads, kv_heads, head_size;
  bool plain;  ///< q and k are apart, because they are normed by head

  // Bytes from the layer's begin; every part starts at a multiple of 256.
  struct Offsets {
    std::size_t qkv, out, lse, plain_q, plain_k, end;
  };
  Offsets offsets(std::size_t tokens) const;
};
CaptureShape capture_shape(const ModelConfig& config, Dtype dtype);

/// Of one layer, of the tokens that go through it together.
struct LayerOutputs {
  std::byte *qkv, *out;
  float* lse;                    // or null
  std::byte *plain_q, *plain_k;  // or null: q and k are what qkv holds
};

/// Memory for them: one place used again by every layer, or, for a capture, two layers of a
/// prompt's chunk in turn and all layers of a step.
class LayerOutputMemory {
 public:
  LayerOutputMemory(const CaptureShape& shape, std::size_t rows, std::size_t chunk_tokens,
                    bool capture, cudaStream_t stream);
  /// Device memory that it needs.
  static std::size_t bytes(const CaptureShape& shape, std::size_t rows, std::size_t chunk_tokens,
                           bool capture);

  LayerOutputs chunk(std::uint32_t layer, std::size_t tokens) const;
  LayerOutputs step(std::uint32_t layer) const;
  /// Of the last step's token: all layers, CaptureShape of one token.
  const std::byte* step_data() const { return step_.data(); }

 private:
  LayerOutputs captured_at(std::byte* base, std::size_t tokens) const;

  CaptureShape shape_;
  bool capture_;
  cuda::DeviceBuffer qkv_, out_, chunks_, step_;
};

}  // namespace kvlab
