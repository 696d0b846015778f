// Where each layer of an append puts what the next launches need, and what a capture keeps.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/checkpoint/model.hpp"
#include "engine/cuda/decoder_options.hpp"
#include "kernels/host/arena.hpp"

namespace kvlab {

/// What a captured append left in device memory, layer by layer: `layers` of these after each
/// other, each `tokens` long.
struct CaptureShape {
  Dtype dtype;
  std::uint32_t layers, query_heads, kv_heads, head_size;
  bool plain;      ///< q and k are apart, because they are normed by head
  bool residuals;  ///< no norm stands between attention and the residual stream

  // Bytes from the layer's begin; every part starts at a multiple of 256.
  struct Offsets {
    std::size_t qkv, out, lse, norm2, plain_q, plain_k, end;
  };
  Offsets offsets(std::size_t tokens) const;
};
CaptureShape capture_shape(const ModelConfig& config, Dtype dtype);

/// What a layer left, in float32: q, k, v, out and lse [token, head, dim or 1], norm2 [token].
struct CapturedLayer {
  std::vector<float> q, k, v, out, lse, norm2;
  /// `data`: on the host, one of CaptureShape.
  void read(const CaptureShape& shape, const std::byte* data, std::size_t tokens);
};

/// Of one layer, of the tokens that go through it together.
struct LayerOutputs {
  std::byte *qkv, *out;
  float* lse;                    // or null
  float* norm2;                  // or null: squared norms of the residual stream behind attention
  std::byte *plain_q, *plain_k;  // or null: q and k are what qkv holds
};

/// Memory for them: one part used again by every layer, or, where they are kept, two that a
/// prompt's chunks alternate between, and all layers of a step.
class LayerOutputMemory {
 public:
  /// `rows`: most tokens at once; of a prompt, of a step.
  struct Rows {
    std::size_t chunk, step;
    std::size_t most() const { return chunk > step ? chunk : step; }
  };
  LayerOutputMemory(const CaptureShape& shape, Rows rows, bool keep, cudaStream_t stream);
  /// Device memory that it needs.
  static std::size_t bytes(const CaptureShape& shape, Rows rows, bool keep) {
    return cuda::Placed<Parts>::bytes(shape, rows, keep);
  }

  /// For a layer of a chunk; where they are kept, the one before it stays as it is. Alternates, and
  /// does not go by layer: the last layer of a chunk and the first of the next follow each other,
  /// too.
  LayerOutputs next_chunk(std::size_t tokens);
  LayerOutputs step(std::uint32_t layer) const;
  /// Of the last step: all layers, CaptureShape of a token for each row.
  const std::byte* step_data() const { return memory_->step; }

 private:
  struct Parts {
    Parts(cuda::Arena& arena, const CaptureShape& shape, Rows rows, bool keep);
    std::byte *one = nullptr, *chunks = nullptr, *step = nullptr;
  };
  LayerOutputs captured_at(std::byte* base, std::size_t tokens) const;
  LayerOutputs passing() const;  ///< where they are not kept

  CaptureShape shape_;
  Rows rows_;
  bool keep_;
  std::size_t half_ = 0;  // of the chunks, written last
  cuda::Placed<Parts> memory_;
};

inline LayerOutputMemory::Rows output_rows(const CudaDecoderOptions& options) {
  return {options.prefill_tokens, static_cast<std::size_t>(options.sequences)};
}

}  // namespace kvlab
