// Every token of every sequence: a token's slot is its position.
#pragma once

#include "engine/cuda/cache/device_cache.hpp"
#include "engine/cuda/model/device_model.hpp"
#include "kernels/attention.hpp"

namespace kvlab {

class FullCache final : public DeviceCache {
 public:
  struct Options {
    int sequences;
    std::uint32_t slots;  ///< tokens that each sequence may hold
    int rows;             ///< most that go through a layer together

    /// A slot that no token has: one more than there are tokens.
    std::uint32_t capacity() const { return slots + 1; }
  };
  /// `batch` must outlive it.
  FullCache(const DeviceModel& model, const BatchState& batch, Options options,
            cudaStream_t stream);
  /// What it allocates.
  static CacheBytes bytes(const DeviceModel& model, const Options& options);

  BatchState::Row row(std::uint32_t fed) const override;
  std::uint32_t prefill_chunk(int sequence) const override;
  std::unique_ptr<Admission> admit(int sequence, std::uint32_t fed, std::uint32_t tokens) override;
  std::unique_ptr<const CacheStep> step(int rows, const LayerOutputMemory& outputs) const override;
  std::uint64_t live_bytes(int sequence, std::uint32_t fed) const override;
  void pretend(int sequence, std::uint32_t tokens) override;

 private:
  class Prompt;
  class Step;
  struct Storage {
    Storage(cuda::Arena& arena, const DeviceModel& model, const Options& options);
    std::byte *keys, *values;  // [layer, sequence, kv_head, slot, dim], keys rotated
  };
  struct Work {
    Work(cuda::Arena& arena, const DeviceModel& model, const Options& options);
    std::byte* q;         // [row, query_head, dim], rotated
    float2* rope;         // [position, rotated / 2]
    std::int32_t* iota;   // [slot]
    std::int32_t* zeros;  // [row]
    std::byte* workspace;
  };
  kernels::RopeWriteArgs write(std::uint32_t layer, int sequence) const;
  std::size_t offset(std::uint32_t layer, int sequence) const;

  const DeviceModel& model_;
  const ModelConfig& config_;
  const BatchState& batch_;
  Options options_;
  cudaStream_t stream_;
  kernels::AttentionShape shape_;
  cuda::Placed<Storage> storage_;
  cuda::Placed<Work> work_;
};

}  // namespace kvlab
