// The CUDA decoder's cache that evicts: a KvCache for the layers on which the policy acts, and
// rings for layers with a sliding window. All its kernels for a decoded token are part of the CUDA
// graph of the decode step.
#pragma once

#include "engine/cuda/cache/device_cache.hpp"
#include "engine/cuda/cache/observed_attention.hpp"
#include "engine/cuda/cache/window_rings.hpp"
#include "kernels/cache/kv_cache.hpp"
#include "kernels/runtime/policy_kernels.hpp"

namespace kvlab {

/// The configuration of the decoder's KvCache, without the parts that need a device: kernels of
/// compiled policies, and weights. Throws std::invalid_argument for caches that one decoder cannot
/// combine, or that do not fit the model.
kernels::KvCacheConfig slots_config(const DeviceShape& model, const CudaDecoderOptions& options);

class EvictingCache final : public DeviceCache {
 public:
  /// `batch` must outlive this object. Throws as slots_config() does.
  EvictingCache(const DeviceModel& model, const BatchState& batch, CudaDecoderOptions options,
                cudaStream_t stream);
  /// The bytes that it allocates. They include the memory of the longest append if its length is
  /// known.
  static CacheBytes bytes(const DeviceModel& model, const CudaDecoderOptions& options);

  BatchState::Row row(std::uint32_t fed) const override;
  std::uint32_t prefill_chunk(int sequence) const override;
  std::unique_ptr<DeviceAppend> append(int sequence, std::uint32_t fed, std::uint32_t tokens,
                                       bool ends_prompt) override;
  void before_token(int sequence, std::uint32_t fed) override {
    slots_.before_token(sequence, fed);
  }
  void end_prompt(int sequence, std::uint32_t fed) override { slots_.end_prompt(sequence, fed); }
  std::unique_ptr<const CacheStep> step(int rows, const LayerOutputMemory& outputs) const override;
  std::uint64_t live_bytes(int sequence, std::uint32_t fed) const override {
    return slots_.live_bytes(sequence, fed) + rings_.live_bytes(fed);
  }
  std::vector<std::vector<std::uint32_t>> kept(int sequence, std::uint32_t fed) const override;
  std::uint64_t evictions(int sequence, std::uint32_t before) const override {
    return slots_.evictions(sequence, before);
  }
  void pretend(std::uint32_t tokens) override;

  // For CacheWatch.
  const WindowRings& rings() const { return rings_; }
  const kernels::KvCache& slots() const { return slots_; }
  /// The layer's index among the layers of slots().
  std::uint32_t index_of(std::uint32_t layer) const { return layer_indices_[layer]; }

 private:
  class Prompt;
  class Step;
  kernels::AttendedRows attended_rows(const LayerOutputs& to) const;
  /// Completes the arguments of a write to a ring with RoPE and queries.
  kernels::RopeWriteArgs rope_args(kernels::RopeRows user, std::uint32_t layer,
                                   kernels::RopeWriteArgs args) const;

  const DeviceModel& model_;
  const ModelConfig& config_;
  const BatchState& batch_;
  CudaDecoderOptions options_;
  cudaStream_t stream_;
  std::vector<std::uint32_t> layer_indices_;          // [layer]
  std::unique_ptr<kernels::PolicyKernels> compiled_;  // null: the policy is in the registry
  kernels::KvCache slots_;
  WindowRings rings_;
  ObserverBranch branch_;
};

}  // namespace kvlab
