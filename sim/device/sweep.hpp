// The configurations of a replay, in the layout that the kernels read.
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
/// Whether the policy's caches always keep the sinks and the most recent tokens, or all tokens.
/// Then the appends alone determine which tokens are live, and such a cache needs no walk.
inline bool is_window(const PolicySpec& policy) {
  const PolicyInfo& info = policy.entry->info;
  return policy.tier_plan.is_plain() &&
         (!info.evicts || (info.oldest_first && policy.modifiers == Modifiers{}));
}

/// Configurations of one policy and of similar cache size, which one launch of a walk runs.
struct Members {
  struct Kind {
    std::shared_ptr<const PolicyEntry> policy;
    kernels::ReplayTokens tokens;
    bool largest;   ///< group=max: a token's mass is the largest that a head gives it
    bool by_layer;  ///< scope=layer: each configuration keeps one set of tokens per layer
    int size_class;
    bool operator==(const Kind&) const = default;
  };
  Kind kind;
  std::vector<std::int32_t> configs = {};
  std::uint32_t max_slots = 0, max_tiers = 0;
  cuda::DeviceBuffer on_device = {};
};

/// The sweep in the layout that the kernels read.
class DeviceSweep {
 public:
  /// `tokens`: length of the sequence. `walks_all`: policies for which is_window() is true get a
  /// walk, too. That is necessary for the metric `passage_recall`, which needs the sums of the kept
  /// tokens of each passage. `wants_fp16_copies`: adds, for each quantized configuration, a
  /// configuration that keeps the same tokens in 16 bit. `config_tasks`: see kernels::ReplaySweep.
  DeviceSweep(std::span<const ResolvedConfig* const> configs, std::uint32_t tokens, bool walks_all,
              bool wants_fp16_copies, int config_tasks = 0);

  /// The rules of head tasks, with the addresses of their features: [head task, configuration].
  /// Groups of `count` head tasks are on the device together. Each feature has space for `tokens`
  /// tokens.
  std::vector<kernels::ReplayRule> rules_of(const ModelShape& shape, std::uint32_t sequence,
                                            std::span<const HeadTask> tasks, std::size_t count,
                                            const float* features_on_device,
                                            std::size_t tokens) const;
  kernels::ReplaySets sets() const { return {sets_.as<std::int32_t>(), tiles_, quantized_tiles_}; }
  int config_tasks() const { return config_tasks_; }

  /// Token features that several configurations share, because they read the same features and have
  /// the same appends.
  struct Features {
    const ResolvedConfig* like;  ///< one of these configurations
    std::uint32_t first;         ///< index among a head task's features
  };

  std::vector<Members> members;
  std::vector<std::int32_t> windows;  ///< configurations without a walk: see is_window()
  cuda::DeviceBuffer windows_on_device;
  std::map<std::int32_t, const ResolvedConfig*> window_configs;
  /// Number of slots of all configurations together. If each configuration has separate head tasks:
  /// the largest number of slots of one configuration.
  std::int64_t task_slots = 0;
  std::vector<Features> features;  ///< the features of a head task
  /// Number of features per token of all configurations together. If each configuration has
  /// separate head tasks: the number of one configuration.
  std::uint32_t feature_count = 0;
  std::size_t configs;  ///< number of configurations, with the fp16 copies, which come last
  std::vector<std::int32_t> fp16_copy;  ///< [configuration]: index of its fp16 copy; -1: none
  SweepTiers tiers;
  bool uses_tiers = false;  ///< whether a configuration has a tier plan
  int state_stride = 8;
  bool cache_positions = false;
  bool by_layer = false;  ///< whether a configuration keeps one set of tokens per layer, so that
                          ///< head tasks are whole layers

 private:
  kernels::ReplayRule add_rule(const ResolvedConfig& config, bool is_walked);
  void add_member(const ResolvedConfig& config, std::int32_t index,
                  const kernels::ReplayRule& rule);
  void send(std::span<const ResolvedConfig* const> configs, std::uint32_t tokens);
  void add_fp16_copies();
  void add_heads(std::span<const ResolvedConfig* const> configs);
  void send_sets();
  /// Adds the configuration's features to those of a head task, unless the head task already has
  /// them. Returns the index of the first of these features.
  std::uint32_t add_features(const ResolvedConfig& config);

  // [configuration]; if by_head_ is not 0: [layer, KV head, configuration].
  std::vector<kernels::ReplayRule> rules_;
  std::vector<std::uint32_t> first_features_;  // [configuration]: index of its first feature
  cuda::DeviceBuffer appends_, params_, sets_;
  int tiles_ = 0, quantized_tiles_ = 0, config_tasks_;
  std::size_t by_head_ = 0;  ///< KV heads per layer if budgets differ by head; otherwise 0
};

}  // namespace kvlab
