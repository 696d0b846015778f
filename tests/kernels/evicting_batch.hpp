// A batch that decodes and evicts on the device, and is compared with the eviction rule on the
// host.
#pragma once

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/evict/eviction_kernels.hpp"
#include "policies/aged_set.hpp"
#include "tests/device.hpp"

namespace kvlab::kernels {

struct EvictingSize {
  std::string policy = "h2o";
  Type type = KVLAB_BF16;
  int head_size = 64, group = 4, kv_heads = 2, sequences = 1;
  std::vector<std::uint32_t> budgets = {33};  ///< of the pairs, used cyclically; 0: no budget
  std::uint32_t prompt = 0;                   ///< tokens that are in the cache at the start
  Positions numbering = Positions::original;
  double tau = 0.01;
  float scale = 0;          ///< 0: 1 / sqrt(head_size)
  bool equal_keys = false;  ///< every key is the same
  bool settled = false;
  int steps = 0;  ///< number of steps, for the size of caches without a budget
  bool sinks = false;

  std::string name() const;
};

class EvictingBatch {
 public:
  EvictingBatch(const EvictionKernels& kernels, const EvictingSize& size);

  /// Samples the next token of each sequence that is not idle, and writes it to its slot. `idle`:
  /// [sequence].
  void sample_tokens(const std::vector<bool>& idle = {});
  /// Uses the workspace of `other`, because all layers of a step share one.
  void share_workspace(const EvictingBatch& other) { workspace_ = other.workspace_; }
  /// Enqueues the kernels; can be captured.
  cudaError_t enqueue(cudaStream_t stream) const;
  /// Enqueues with rotated keys, even if the policy does not allow it.
  cudaError_t enqueue_with_rotated_keys() const;
  /// Compares outputs and observations with float64. Gives the device's observations to the
  /// eviction rule on the host, and compares states, victims and lengths with that rule. Advances
  /// the host to the next step.
  void check();
  /// The device's outputs, states, observations, lengths and next slots.
  std::vector<std::byte> bits() const;
  /// Restores the device's state before the step, to repeat it.
  void restore();

 private:
  struct Pair {
    std::unique_ptr<LiveSet> live;
    std::int64_t first = 0;
    int capacity = 0, next = 0;
    std::uint32_t sinks = 0;
    std::vector<std::uint32_t> slot_of;  ///< by position
  };

  int pairs() const { return size_.kv_heads * size_.sequences; }
  std::size_t dim() const { return static_cast<std::size_t>(size_.head_size); }
  std::size_t group() const { return static_cast<std::size_t>(size_.group); }
  /// Whether keys are stored rotated: with cache positions, under policies that support it.
  bool keeps_rotated_keys() const {
    return size_.numbering == Positions::cache && kernels_.oldest_first;
  }
  EvictingAttentionArgs args() const;
  void begin_pair(int index);
  void put(Pair& pair, std::uint32_t position, std::uint32_t slot);
  void upload();
  void poison();
  void check_pair(int index);
  void check_observations(const Pair& pair, int index, class AttentionErrors& errors);
  std::vector<float> gather(const std::vector<float>& from, const Pair& pair) const;

  /// A copy, made before a step, of the device data that the step changes.
  struct Before {
    std::vector<std::int32_t> lengths, next_slots;
    std::vector<std::byte> states;
    std::vector<std::uint32_t> ages;
  };

  const EvictionKernels kernels_;
  EvictingSize size_;
  PolicySpec spec_;
  std::mt19937 random_{11};
  std::vector<Pair> all_;
  std::vector<std::uint32_t> tokens_;  ///< [sequence]: number of tokens so far
  std::vector<std::uint32_t> now_, host_positions_;
  std::vector<float> keys_, values_, q_, inv_freq_, features_, sinks_;
  std::vector<std::byte> states_, bytes_out_;
  std::vector<Observation> seen_;
  std::vector<float> lse_;
  Before before_;
  std::size_t slots_ = 0;
  int max_slots_ = 1;
  template <class T>
  using Array = std::unique_ptr<DeviceArray<T>>;
  Array<std::byte> device_keys_, device_values_, device_q_, out_, device_states_, params_;
  std::shared_ptr<DeviceArray<std::byte>> workspace_;
  Array<float> device_lse_, device_inv_freq_, device_features_, device_sinks_;
  Array<std::uint32_t> positions_, ages_, threshold16_, sequence_ids_, device_now_;
  Array<std::uint64_t> seeds_;
  Array<std::int64_t> first_slot_;
  Array<std::int32_t> lengths_, next_slots_;
  Array<kvlab_rule> rules_;
  Array<Observation> device_seen_;
};

}  // namespace kvlab::kernels
