// One layer of one sequence while many tokens are admitted at once: the live tokens, the new ones
// behind them, and what is counted of them. Grows with the longest admission; used by every layer.
#pragma once

#include "engine/cuda/model/device_model.hpp"
#include "kernels/evict/admission.hpp"

namespace kvlab {

class AdmissionMemory {
 public:
  struct Need {
    bool squeezed, observes;
    std::size_t slot_bytes;
    int part_tokens;  ///< of the admission that attend together
  };
  AdmissionMemory(const DeviceModel& model, Need need, cudaStream_t stream);

  /// What reserve() takes of the device's memory.
  static std::size_t bytes(const DeviceModel& model, const Need& need, std::uint32_t slots);

  /// For live and new tokens together. Waits, where memory has to grow.
  void reserve(std::uint32_t slots);
  int slots() const { return slots_; }

  /// The layer's cache, of one sequence: [kv_head, slot].
  kernels::SlotCache cache() const;
  std::byte* states() const { return states_.data(); }
  Observation* seen() const { return seen_.as<Observation>(); }
  /// Keys as attention reads them: those of cache(), or turned by age.
  void* turned_keys() const { return need_.squeezed ? turned_.data() : keys_.data(); }
  kernels::RowSoftmax* rows() const { return rows_.as<kernels::RowSoftmax>(); }
  void* observe_workspace() const { return observe_workspace_.data(); }
  void* shrink_workspace() const { return shrink_workspace_.data(); }
  kernels::AttentionShape shape() const { return model_.attention_shape(slots_); }
  std::int32_t* older() const { return lengths_.as<std::int32_t>(); }  // [kv_head], device

  /// Nothing is live yet and nothing was seen.
  void clear_older();
  void clear_seen();

 private:
  const DeviceModel& model_;
  Need need_;
  cudaStream_t stream_;
  int slots_ = 0;
  cuda::DeviceBuffer keys_, values_, turned_;       // [kv_head, slot, dim]
  cuda::DeviceBuffer positions_, states_, seen_;    // [kv_head, slot]
  cuda::DeviceBuffer lengths_, next_, first_slot_;  // [kv_head]
  cuda::DeviceBuffer rows_;                         // [part token, query_head]
  cuda::DeviceBuffer observe_workspace_, shrink_workspace_;
};

}  // namespace kvlab
