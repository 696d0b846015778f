// A cache that evicts: each KV head of each layer of each sequence has as many slots as its budget,
// and a policy decides who leaves. In decoding everything is in the step's graph: the victim's slot
// takes the next token.
#pragma once

#include <memory>
#include <optional>

#include "engine/cuda/cache/admission_memory.hpp"
#include "engine/cuda/cache/device_cache.hpp"
#include "engine/cuda/cache/observed_attention.hpp"
#include "engine/cuda/cache/pair_slots.hpp"
#include "kernels/evict/eviction_kernels.hpp"
#include "kernels/runtime/policy_kernels.hpp"
#include "kernels/evict/squeeze.hpp"

namespace kvlab {

class EvictingCache final : public DeviceCache {
 public:
  struct Options {
    /// [sequence]: all of one policy and one numbering of positions; the rest may differ.
    std::vector<CacheOptions> caches;
    std::uint32_t most_tokens = 0;  ///< of any sequence; 0: no limit
    int part_tokens = 1;            ///< of a prompt that go through a layer together
    /// Live and new tokens of the longest admission, where it is known: for work_bytes(). 0: it
    /// grows.
    std::uint32_t longest_admission = 0;
    bool watched = false;  ///< keep what each live token received
    bool plain = false;    ///< by the plain kernels, where the fast ones would do

    const PolicyInfo& policy() const { return caches.front().policy.entry->info; }
    /// Positions are numbered by age at every step.
    bool squeezed() const { return caches.front().positions == Positions::cache; }
    /// Keys are cached rotated all the same: see EvictingAttentionArgs.
    bool two_frames() const { return squeezed() && policy().oldest_first; }
    /// Keys are cached before RoPE, beside their ages.
    bool turns_by_age() const { return squeezed() && !two_frames(); }
  };
  /// `batch` must outlive it. Throws std::invalid_argument for caches that do not go together.
  EvictingCache(const DeviceModel& model, const BatchState& batch, Options options,
                cudaStream_t stream);

  /// Device memory that it takes for keys, values, positions and states; and beside them for work,
  /// without what long admissions add.
  static std::uint64_t bytes(const DeviceModel& model, const Options& options);
  static std::uint64_t work_bytes(const DeviceModel& model, const Options& options);

  BatchState::Row row(std::uint32_t fed) const override;
  void refuse_beyond(std::uint32_t fed, std::uint64_t more) const override;
  std::uint32_t admission_tokens(int sequence) const override;
  void begin_admission(int sequence, std::uint32_t fed, std::uint32_t tokens) override;
  void begin_layer(std::uint32_t layer) override;
  kernels::RopeWriteArgs prompt_write(std::uint32_t layer, const PromptPart& part) override;
  void attend_prompt(std::uint32_t layer, const PromptPart& part, const LayerOutputs& to) override;
  void end_layer(std::uint32_t layer) override;
  void begin_step(int rows) override;
  kernels::RopeWriteArgs step_write(std::uint32_t layer, int rows) override;
  void attend_step(std::uint32_t layer, int rows, const LayerOutputs& to) override;
  void observe_step() override;
  void end_step() override;
  std::uint64_t live_bytes(int sequence, std::uint32_t fed) const override;
  std::uint64_t evictions(int sequence, std::uint32_t behind) const override;
  void pretend(int sequence, std::uint32_t tokens) override;

  // For those who watch.
  const PairSlots& slots() const { return slots_; }
  kernels::SlotCache layer_cache(std::uint32_t layer, int sequences) const;
  kernels::PolicyState layer_policy(std::uint32_t layer) const;
  const AdmissionMemory& admission() const { return *admission_; }
  std::size_t slot_bytes() const { return kernels_.slot_bytes; }
  const PolicyInfo& policy() const { return options_.policy(); }

 private:
  struct Admission {
    int sequence = 0;
    std::uint32_t fed = 0, tokens = 0;
  };

  void fill_rules();
  void shrink(const kernels::SlotCache& from, std::byte* from_states, Observation* seen,
              const kernels::SlotCache& to, std::byte* to_states, std::uint32_t layer);
  kernels::SlotCache of_sequence(kernels::SlotCache cache, int sequence) const;
  kernels::PolicyState of_sequence(kernels::PolicyState policy, int sequence) const;
  /// Places of an admission's keys and queries by age.
  kernels::SqueezeArgs squeeze_shape(int first, int tokens) const;
  /// Turns an admission's keys by age: the older ones, or a part's new ones.
  void squeeze_keys(const kernels::SqueezeArgs& shape, bool of_older);
  /// An admission's keys as queries find them.
  const void* attended_keys() const;
  std::size_t pair_index(std::uint32_t layer, std::size_t pair) const {
    return layer * slots_.pairs() + pair;
  }

  const DeviceModel& model_;
  const ModelConfig& config_;
  const BatchState& batch_;
  Options options_;
  cudaStream_t stream_;
  PairSlots slots_;
  std::unique_ptr<kernels::PolicyKernels> compiled_;  // or null: the policy is in the registry
  kernels::EvictionKernels kernels_;
  kernels::AdmissionPolicy admission_kernels_;
  cuda::DeviceBuffer keys_, values_;                               // [slot, dim]
  cuda::DeviceBuffer positions_, states_, seen_, ages_;            // [slot]
  cuda::DeviceBuffer first_slots_, lengths_, next_slots_, rules_;  // [layer, pair]
  cuda::DeviceBuffer params_, thresholds_, seeds_, sequence_ids_;  // [sequence]
  cuda::DeviceBuffer q_;                                           // [row, query_head, dim]
  cuda::DeviceBuffer inv_freq_, turns_;  // [rotated / 2], [row, rotated / 2]
  cuda::DeviceBuffer iota_, zeros_;      // [part token]
  cuda::DeviceBuffer admitted_;          // nothing; now and tokens of the admission
  cuda::DeviceBuffer weights_;           // [age]
  std::unique_ptr<AdmissionMemory> admission_;
  std::unique_ptr<ObservedAttention> attention_;
  Admission current_;
};

}  // namespace kvlab
