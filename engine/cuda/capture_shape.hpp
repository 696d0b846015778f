// Memory for the outputs of each layer during an append. The next launches read them, and a capture
// keeps them.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/checkpoint/model.hpp"
#include "engine/cuda/decoder_options.hpp"
#include "kernels/host/arena.hpp"

namespace kvlab {

/// The layout of a captured append in device memory: one block for each layer, one after another.
/// The size of a block depends on the number of tokens; see offsets().
struct CaptureShape {
  Dtype dtype;
  std::uint32_t layers, query_heads, kv_heads, head_size;
  bool plain;      ///< q and k are stored separately, because each head has norms
  bool residuals;  ///< whether norm2 is stored: only if attention is added to the residual stream
                   ///< without a norm

  // Offsets in bytes from the start of the layer's block. Every part starts at a multiple of 256.
  struct Offsets {
    std::size_t qkv, out, lse, norm2, plain_q, plain_k, end;
  };
  Offsets offsets(std::size_t tokens) const;
};
CaptureShape capture_shape(const ModelConfig& config, Dtype dtype);

/// A captured layer in float32: q, k, v, out and lse [token, head, dim or 1], norm2 [token].
struct CapturedLayer {
  std::vector<float> q, k, v, out, lse, norm2;
  /// Reads a layer's block, which is in host memory.
  void read(const CaptureShape& shape, const std::byte* data, std::size_t tokens);
};

/// The outputs of one layer for the tokens that go through it at the same time.
struct LayerOutputs {
  std::byte *qkv, *out;
  float* lse;                    // or null
  float* norm2;                  // squared norms of the residual stream after attention, or null
  std::byte *plain_q, *plain_k;  // null: q and k are in qkv
};

/// Memory for layer outputs. If outputs are not kept, every layer reuses one part. If they are
/// kept, the chunks of a prompt alternate between two parts, and a step has a part for each layer.
class LayerOutputMemory {
 public:
  /// Maximum number of rows of a prompt's chunk, and of a step.
  struct Rows {
    std::size_t chunk, step;
    std::size_t max_rows() const { return chunk > step ? chunk : step; }
  };
  LayerOutputMemory(const CaptureShape& shape, Rows rows, bool keep, cudaStream_t stream);
  /// Bytes of device memory that the constructor allocates for the same arguments.
  static std::size_t bytes(const CaptureShape& shape, Rows rows, bool keep) {
    return cuda::Placed<Parts>::bytes(shape, rows, keep);
  }

  /// The memory for the next layer of a chunk. If outputs are kept, calls alternate between two
  /// parts of the memory, so that the outputs of the previous layer stay unchanged. Alternating by
  /// the layer's number would not do, because after the last layer of a chunk comes the first layer
  /// of the next chunk.
  LayerOutputs next_chunk(std::size_t tokens);
  LayerOutputs step(std::uint32_t layer) const;
  /// All layers of the last step, laid out by a CaptureShape with one token for each row.
  const std::byte* step_data() const { return memory_->step; }

 private:
  struct Parts {
    Parts(cuda::Arena& arena, const CaptureShape& shape, Rows rows, bool keep);
    std::byte *one = nullptr, *chunks = nullptr, *step = nullptr;
  };
  LayerOutputs captured_at(std::byte* base, std::size_t tokens) const;
  LayerOutputs passing() const;  ///< the part that is reused, if outputs are not kept

  CaptureShape shape_;
  Rows rows_;
  bool keep_;
  std::size_t half_ = 0;  // the chunk part that was written last
  cuda::Placed<Parts> memory_;
};

inline LayerOutputMemory::Rows output_rows(const CudaDecoderOptions& options) {
  return {options.prefill_tokens, static_cast<std::size_t>(options.sequences)};
}

}  // namespace kvlab
