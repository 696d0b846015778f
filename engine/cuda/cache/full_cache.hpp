// Every token of every sequence: a token's slot is its position.
#pragma once

#include "engine/cuda/cache/device_cache.hpp"
#include "engine/cuda/model/device_model.hpp"
#include "kernels/attention.hpp"

namespace kvlab {

class FullCache final : public DeviceCache {
 public:
  /// `slots`: tokens that each sequence may hold; `rows`: most that go through a layer together.
  /// `batch` must outlive it.
  FullCache(const DeviceModel& model, const BatchState& batch, int sequences, std::uint32_t slots,
            int rows, cudaStream_t stream);

  /// Keys and values of so many tokens of one sequence, all layers.
  static std::uint64_t bytes(const DeviceModel& model, std::uint64_t tokens);
  /// Of the work buffers beside them.
  static std::uint64_t work_bytes(const DeviceModel& model, int sequences, std::uint32_t slots,
                                  int rows);
  /// A slot that no token has: one more than there are tokens.
  static std::uint32_t capacity(std::uint32_t slots) { return slots + 1; }

  BatchState::Row row(std::uint32_t fed) const override;
  void refuse_beyond(std::uint32_t fed, std::uint64_t more) const override;
  std::uint32_t admission_tokens(int sequence) const override;
  kernels::RopeWriteArgs prompt_write(std::uint32_t layer, const PromptPart& part) override;
  void attend_prompt(std::uint32_t layer, const PromptPart& part, const LayerOutputs& to) override;
  kernels::RopeWriteArgs step_write(std::uint32_t layer, int rows) override;
  void attend_step(std::uint32_t layer, int rows, const LayerOutputs& to) override;
  std::uint64_t live_bytes(int sequence, std::uint32_t fed) const override;
  void pretend(int sequence, std::uint32_t tokens) override;

 private:
  kernels::RopeWriteArgs write(std::uint32_t layer, int sequence);
  std::size_t offset(std::uint32_t layer, int sequence) const;

  const DeviceModel& model_;
  const ModelConfig& config_;
  const BatchState& batch_;
  int sequences_;
  std::uint32_t slots_;
  int rows_;
  cudaStream_t stream_;
  kernels::AttentionShape shape_;
  cuda::DeviceBuffer keys_, values_;  // [layer, sequence, kv_head, slot, dim], keys rotated
  cuda::DeviceBuffer q_;              // [row, query_head, dim], rotated
  cuda::DeviceBuffer rope_;           // [position, rotated / 2]
  cuda::DeviceBuffer iota_, zeros_;   // [slot], [row]
  cuda::DeviceBuffer workspace_;
};

}  // namespace kvlab
