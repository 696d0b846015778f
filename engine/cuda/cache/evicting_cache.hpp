// A cache that evicts: each KV head of each layer of each sequence has as many slots as its budget,
// and a policy decides who leaves. In decoding everything is in the step's graph: the victim's slot
// takes the next token.
#pragma once

#include "engine/cuda/cache/device_cache.hpp"
#include "engine/cuda/cache/observed_attention.hpp"
#include "engine/cuda/cache/slot_storage.hpp"
#include "engine/cuda/cache/span_rings.hpp"
#include "kernels/attention.hpp"
#include "kernels/evict/admission.hpp"
#include "kernels/evict/eviction_kernels.hpp"
#include "kernels/runtime/policy_kernels.hpp"
#include "policies/rungs/rung_counts.hpp"

namespace kvlab {

/// One layer of one sequence while many tokens are admitted at once: the live tokens, the new ones
/// behind them, and what is counted of them. Used by one layer after the other.
struct AdmissionMemory {
  AdmissionMemory() = default;
  /// `slots`: for live and new tokens together.
  AdmissionMemory(cuda::Arena& arena, const DeviceShape& model, const CudaDecoderOptions& options,
                  std::uint32_t slots);

  /// [kv_head, slot]; lengths are those of the tokens that were live already.
  kernels::SlotCache cache{};
  std::byte* states = nullptr;          // [kv_head, slot, slot_bytes]
  float* columns = nullptr;             // [kv_head, slot, column]; or null
  std::byte* plain_keys = nullptr;      // [new token, kv_head, dim], before RoPE; or null
  std::byte* squeezed_keys = nullptr;   // [kv_head, slot, dim], rotated by age; or null
  std::int64_t* first_slots = nullptr;  // [kv_head]
  Observation* seen = nullptr;          // [kv_head, slot]; null where nothing is observed
  kernels::RowSoftmax* rows = nullptr;  // [part token, query_head]; likewise
  float* weights = nullptr;             // [age of a query]; null: all weigh 1
  kernels::StagedCodes staged{};        ///< where the live tokens lie on rungs
  std::byte *observe_workspace = nullptr, *shrink_workspace = nullptr;
};

class EvictingCache final : public DeviceCache {
 public:
  /// `batch` must outlive it. Throws std::invalid_argument for caches that do not go together.
  EvictingCache(const DeviceModel& model, const BatchState& batch, CudaDecoderOptions options,
                cudaStream_t stream);
  /// What it allocates; where the longest admission is known, with what that adds.
  static CacheBytes bytes(const DeviceModel& model, const CudaDecoderOptions& options);

  BatchState::Row row(std::uint32_t fed) const override;
  std::uint32_t prefill_chunk(int sequence) const override;
  std::unique_ptr<DeviceAdmission> admit(int sequence, std::uint32_t fed, std::uint32_t tokens,
                                         bool ends_prompt) override;
  void before_token(int sequence, std::uint32_t fed) override;
  void end_prompt(int sequence, std::uint32_t fed) override;
  std::unique_ptr<const CacheStep> step(int rows, const LayerOutputMemory& outputs) const override;
  std::uint64_t live_bytes(int sequence, std::uint32_t fed) const override;
  std::vector<std::vector<std::uint32_t>> kept(int sequence, std::uint32_t fed) const override;
  std::uint64_t evictions(int sequence, std::uint32_t behind) const override;
  void pretend(int sequence, std::uint32_t tokens) override;

  // For those who watch.
  const SpanRings& rings() const { return rings_; }
  const PairSlots& slots() const { return slots_; }
  const SlotStorage& storage() const { return *storage_; }
  /// As an admission left its last layer.
  const AdmissionMemory& admission() const { return *admission_; }
  std::size_t slot_bytes() const { return options_.entry()->slot_bytes; }
  std::size_t columns() const { return options_.policy().column_count(); }

 private:
  class Prompt;
  class Step;
  /// Of a sequence under modifiers or ada(), what follows from all that was admitted: live tokens
  /// of a KV head now, before the last admission, and at most.
  struct Counts {
    std::uint32_t live = 0, behind = 0, most = 0;
    std::uint64_t most_bytes = 0;  ///< on rungs
  };
  /// As a shrink takes it.
  struct Admitted {
    std::uint32_t now, tokens;
  };
  struct Work {
    Work(cuda::Arena& arena, const DeviceModel& model, const PairSlots& slots,
         const CudaDecoderOptions& options);
    std::byte* q;                  // [row, query_head, dim]
    float* inv_freq;               // [table, rotated / 2]
    float2* rope;                  // [table, row, rotated / 2]
    std::byte* plain_k;            // [row, kv_head, dim], before RoPE, where norms hide it; or null
    std::int32_t *iota, *zeros;    // [row]
    Admitted *nothing, *admitted;  // at the first new token's position: none; all
    Admitted* ended;               // none, at the position behind a prompt
    std::byte* workspaces;
  };

  /// Keys before RoPE as a layer has left them, `row` elements from one to the next.
  struct PlainKeys {
    const std::byte* first;
    std::size_t row;
  };
  PlainKeys plain_keys(const LayerOutputs& to) const;
  const float* inv_freq(std::uint32_t table) const {
    return work_->inv_freq + table * config_.head_size / 2;
  }
  /// The rotations of rows, by every table that keys are rotated by where they are cached: of given
  /// positions, or from `first` on.
  void fill_ropes(const std::int32_t* positions, std::uint32_t first, int rows) const;
  float2* rope_rows(std::uint32_t table) const {
    return work_->rope +
           table * static_cast<std::size_t>(options_.rows()) * (config_.head_size / 2);
  }
  /// Queries, plain keys and RoPE of a write.
  void rotate(std::uint32_t layer, const std::int32_t* rows, kernels::RopeWriteArgs& args) const;
  /// Memory for an admission. Waits, where it has to grow.
  const AdmissionMemory& reserve(std::uint32_t slots);
  /// each(pair) for all KV heads of a sequence in a layer.
  template <class Each>
  void each_pair(int sequence, Each each) const {
    const std::size_t first = static_cast<std::size_t>(sequence) * config_.kv_heads;
    for (std::size_t head = 0; head < config_.kv_heads; ++head) each(first + head);
  }
  /// each(layer, pair) for all KV heads of a sequence, in the layers that the policy acts on.
  template <class Each>
  void each_head(int sequence, Each each) const {
    for (std::uint32_t layer = 0; layer < config_.layers; ++layer)
      if (!rings_.has(layer)) each_pair(sequence, [&](std::size_t pair) { each(layer, pair); });
  }

  const Modifiers& modifiers(int sequence) const {
    return options_.caches[static_cast<std::size_t>(sequence)].policy.modifiers;
  }
  bool shares_slots(int sequence) const {
    return options_.caches[static_cast<std::size_t>(sequence)].shares_slots();
  }
  bool counts(int sequence) const {
    return modifiers(sequence) != Modifiers{} || shares_slots(sequence) || options_.coded();
  }
  Counts& counts_of(std::uint32_t layer, std::size_t pair) {
    return counts_[layer * slots_.pairs() + pair];
  }
  const Counts& counts_of(std::uint32_t layer, std::size_t pair) const {
    return counts_[layer * slots_.pairs() + pair];
  }
  std::uint32_t surplus(std::uint32_t layer, std::size_t pair, bool after_prompt) const;
  std::uint32_t older(int sequence, std::uint32_t layer, std::size_t pair, std::uint32_t fed) const;
  void make_room(int sequence, std::uint32_t fed, bool after_prompt);
  void count_admission(int sequence, std::uint32_t layer, std::uint32_t tokens);
  void count_room(int sequence, std::uint32_t layer, bool after_prompt);
  std::vector<std::int32_t> share_slots(int sequence, std::uint32_t layer, std::uint32_t fed);
  void share_slots_of_live(int sequence, std::uint32_t fed);
  /// Between a sequence's slots in a layer, which may have rungs, and an admission's memory.
  void shrink(kernels::ShrinkArgs args, int sequence, std::uint32_t layer, bool after_prompt) const;
  /// The live tokens of a layer, or those that stay, to an admission's memory.
  void take_live(int sequence, std::uint32_t layer, const AdmissionMemory& memory,
                 bool stays) const;
  void shrink_in_place(int sequence, std::uint32_t layer, const AdmissionMemory& memory,
                       bool after_prompt) const;
  void admit_to_rungs(std::uint32_t layer, std::size_t pair, std::uint32_t tokens);
  void count_bytes(std::uint32_t layer, std::size_t pair);
  /// What a shrink does to ranks.
  void modify(kernels::ShrinkArgs& args, int sequence, bool after_prompt) const;

  const DeviceModel& model_;
  const ModelConfig& config_;
  const BatchState& batch_;
  CudaDecoderOptions options_;
  cudaStream_t stream_;
  PairSlots slots_;
  KeyRotation rotation_;
  std::unique_ptr<kernels::PolicyKernels> compiled_;  // or null: the policy is in the registry
  kernels::EvictionKernels kernels_;
  cuda::Placed<SlotStorage> storage_;
  cuda::Placed<Work> work_;
  cuda::Placed<AdmissionMemory> admission_;
  SpanRings rings_;
  ObserverBranch branch_;
  std::vector<Counts> counts_;              // [layer, pair]
  std::vector<RungCounts> on_rungs_;        // [layer, pair]; empty where nobody keeps codes
  std::vector<std::uint32_t> shared_when_;  // [sequence]: fed when slots were shared last
};

}  // namespace kvlab
