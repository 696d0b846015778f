// The configurations of a replay as the kernels read them.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "kernels/host/memory.hpp"
#include "sim/device/sweep_tiers.hpp"
#include "sim/head_view.hpp"
#include "sim/live_counts.hpp"
#include "sim/replay.hpp"

namespace kvlab {

kernels::Type type_of(const std::optional<Dtype>& rounding);
/// Whether what its caches attend follows from their appends alone: sinks, and a run of the
/// newest, or everything. No cache has to be walked.
inline bool is_window(const PolicySpec& policy) {
  const PolicyInfo& info = policy.entry->info;
  return policy.tier_plan.is_plain() &&
         (!info.evicts || (info.oldest_first && policy.modifiers == Modifiers{}));
}

/// Configurations of one policy that one walk takes, and of about the same size.
struct Members {
  struct Kind {
    std::shared_ptr<const PolicyEntry> policy;
    kernels::ReplayTokens tokens;
    bool largest;   ///< as kernels::ReplayMembers has it
    bool by_layer;  ///< each keeps one set for a layer: scope=layer
    int size_class;
    bool operator==(const Kind&) const = default;
  };
  Kind kind;
  std::vector<std::int32_t> configs = {};
  std::uint32_t max_slots = 0, max_tiers = 0;
  cuda::DeviceBuffer on_device = {};
};

/// The sweep as the kernels read it.
class DeviceSweep {
 public:
  /// `tokens`: of the sequence. `walks_all`: windows too, of which else nobody knows what they keep
  /// of a passage. `wants_fp16_copies`: each configuration with quantization has another, of the
  /// same tokens in 16 bit. `config_tasks`: as kernels::ReplaySweep has them.
  DeviceSweep(std::span<const ResolvedConfig* const> configs, std::uint32_t tokens, bool walks_all,
              bool wants_fp16_copies, int config_tasks = 0);

  /// The rules of such head tasks, of which every `count` are on the device together, with the
  /// features that they have there: [head task, configuration], each `tokens` apart.
  std::vector<kernels::ReplayRule> rules_of(const ModelShape& shape, std::uint32_t sequence,
                                            std::span<const HeadTask> tasks, std::size_t count,
                                            const float* features_on_device,
                                            std::size_t tokens) const;
  kernels::ReplaySets sets() const { return {sets_.as<std::int32_t>(), tiles_, quantized_tiles_}; }
  int config_tasks() const { return config_tasks_; }

  /// The features of configurations that name the same and append alike.
  struct Features {
    const ResolvedConfig* like;  ///< one of them
    std::uint32_t first;         ///< among a head task's
  };

  std::vector<Members> members;
  std::vector<std::int32_t> windows;  ///< configurations that evict the oldest first
  cuda::DeviceBuffer windows_on_device;
  std::map<std::int32_t, const ResolvedConfig*> window_configs;
  std::int64_t task_slots = 0;     ///< of all configurations, or, of own head tasks, of the largest
  std::vector<Features> features;  ///< of head tasks that are not a configuration's own
  std::uint32_t feature_count =
      0;                ///< of a token, for all configurations or, of own head tasks, one
  std::size_t configs;  ///< fp16 copies too, which come last
  std::vector<std::int32_t> fp16_copy;  ///< by configuration; -1: it has none
  SweepTiers tiers;
  bool uses_tiers = false;  ///< some are of tier plans
  int state_stride = 8;
  bool cache_positions = false;
  bool by_layer = false;  ///< some keep one set for a layer: head tasks are whole layers

 private:
  kernels::ReplayRule add_rule(const ResolvedConfig& config, bool is_walked);
  void add_member(const ResolvedConfig& config, std::int32_t index,
                  const kernels::ReplayRule& rule);
  void send(std::span<const ResolvedConfig* const> configs, std::uint32_t tokens);
  void add_fp16_copies();
  void add_heads(std::span<const ResolvedConfig* const> configs);
  void send_sets();
  /// Where they are among a head task's.
  std::uint32_t add_features(const ResolvedConfig& config);

  std::vector<kernels::ReplayRule> rules_;     // [configuration]; by_head_: [layer, KV head, that]
  std::vector<std::uint32_t> first_features_;  // [configuration]: of a head task's
  cuda::DeviceBuffer appends_, params_, sets_;
  int tiles_ = 0, quantized_tiles_ = 0, config_tasks_;
  std::size_t by_head_ = 0;  ///< KV heads of a layer, where budgets differ by head
};

}  // namespace kvlab
