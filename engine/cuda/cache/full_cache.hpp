// A cache that keeps every token of every sequence. In a layer without a window, a token's slot is
// its position.
#pragma once

#include "engine/cuda/cache/window_rings.hpp"
#include "kernels/attention.hpp"

namespace kvlab {

class FullCache final : public DeviceCache {
 public:
  /// `batch` must outlive this object.
  FullCache(const DeviceModel& model, const BatchState& batch, CudaDecoderOptions options,
            cudaStream_t stream);
  /// The bytes that it allocates.
  static CacheBytes bytes(const DeviceModel& model, const CudaDecoderOptions& options);

  BatchState::Row row(std::uint32_t fed) const override;
  std::uint32_t prefill_chunk(int sequence) const override;
  std::unique_ptr<DeviceAppend> append(int sequence, std::uint32_t fed, std::uint32_t tokens,
                                       bool ends_prompt) override;
  std::unique_ptr<const CacheStep> step(int rows, const LayerOutputMemory& outputs) const override;
  std::uint64_t live_bytes(int sequence, std::uint32_t fed) const override;
  void pretend(std::uint32_t tokens) override;

 private:
  class Prompt;
  class Step;
  struct Storage {
    Storage(cuda::Arena& arena, const DeviceModel& model, const CudaDecoderOptions& options);
    std::byte *keys,
        *values;  // [layer without a window, sequence, kv_head, slot, dim], keys rotated
  };
  struct Work {
    Work(cuda::Arena& arena, const DeviceModel& model, const CudaDecoderOptions& options);
    std::byte* q;         // [row, query_head, dim], rotated
    float2* rope;         // [table, position, rotated / 2]
    std::int32_t* iota;   // [slot]
    std::int32_t* zeros;  // [row]
    std::byte* workspace;
  };
  kernels::RopeWriteArgs write(std::uint32_t layer, int sequence) const;
  /// Sets the arguments for RoPE and the destination of queries in `args`. (write() sets the
  /// destination of keys and values.)
  void rotate(std::uint32_t layer, kernels::RopeWriteArgs& args) const;
  kernels::AttentionShape shape(std::uint32_t layer) const;
  std::size_t offset(std::uint32_t layer, int sequence) const;

  const DeviceModel& model_;
  const ModelConfig& config_;
  const BatchState& batch_;
  CudaDecoderOptions options_;
  cudaStream_t stream_;
  std::vector<std::size_t>
      layer_indices_;  // [layer]: number of layers without a window before this layer
  cuda::Placed<Storage> storage_;
  cuda::Placed<Work> work_;
  WindowRings rings_;
};

}  // namespace kvlab
