// The configurations of a replay as the kernels read them.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "kernels/host/memory.hpp"
#include "sim/device/grid_rungs.hpp"
#include "sim/head_view.hpp"
#include "sim/live_counts.hpp"
#include "sim/replay.hpp"

namespace kvlab {

kernels::Type type_of(const std::optional<Dtype>& rounding);
/// Whether what its caches attend follows from their admissions alone: sinks, and a run of the
/// newest, or everything. No cache has to be walked.
inline bool is_window(const PolicySpec& policy) {
  const PolicyInfo& info = policy.entry->info;
  return policy.ladder.is_plain() &&
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
  std::uint32_t most_slots = 0, most_rungs = 0;
  cuda::DeviceBuffer on_device = {};
};

/// The grid as the kernels read it.
class Grid {
 public:
  /// `tokens`: of the sequence. `walks_all`: windows too, of which else nobody knows what they keep
  /// of a named span. `wants_twins`: each configuration with codes has another, of the same tokens
  /// in 16 bit. `config_units`: as kernels::ReplayGrid has them.
  Grid(std::span<const ResolvedConfig* const> configs, std::uint32_t tokens, bool walks_all,
       bool wants_twins, int config_units = 0);

  /// The rules of such units, of which every `count` are on the device together, with the columns
  /// that they have there: [unit, configuration], each `tokens` apart.
  std::vector<kernels::ReplayRule> rules_of(const ModelShape& shape, std::uint32_t sequence,
                                            std::span<const ReplayUnit> units, std::size_t count,
                                            const float* columns_on_device,
                                            std::size_t tokens) const;
  kernels::ReplaySets sets() const { return {sets_.as<std::int32_t>(), tiles_, coded_tiles_}; }
  int config_units() const { return config_units_; }

  /// The columns of configurations that name the same and admit alike.
  struct Columns {
    const ResolvedConfig* like;  ///< one of them
    std::uint32_t first;         ///< among a unit's
  };

  std::vector<Members> members;
  std::vector<std::int32_t> windows;  ///< configurations that evict the oldest first
  cuda::DeviceBuffer windows_on_device;
  std::map<std::int32_t, const ResolvedConfig*> window_configs;
  std::int64_t unit_slots = 0;     ///< of all configurations, or, of own units, of the largest
  std::vector<Columns> columns;    ///< of units that are not a configuration's own
  std::uint32_t column_count = 0;  ///< of a token, for all configurations or, of own units, one
  std::size_t configs;             ///< twins too, which come last
  std::vector<std::int32_t> twin;  ///< by configuration; -1: it has none
  GridRungs rungs;
  bool on_rungs = false;  ///< some are of ladders
  int state_stride = 8;
  bool squeezed = false;
  bool by_layer = false;  ///< some keep one set for a layer: units are whole layers

 private:
  kernels::ReplayRule add_rule(const ResolvedConfig& config, bool is_walked);
  void add_member(const ResolvedConfig& config, std::int32_t index,
                  const kernels::ReplayRule& rule);
  void send(std::span<const ResolvedConfig* const> configs, std::uint32_t tokens);
  void add_twins();
  void add_heads(std::span<const ResolvedConfig* const> configs);
  void send_sets();
  /// Where they are among a unit's.
  std::uint32_t add_columns(const ResolvedConfig& config);

  std::vector<kernels::ReplayRule> rules_;    // [configuration]; by_head_: [layer, KV head, that]
  std::vector<std::uint32_t> first_columns_;  // [configuration]: of a unit's
  cuda::DeviceBuffer admissions_, params_, sets_;
  int tiles_ = 0, coded_tiles_ = 0, config_units_;
  std::size_t by_head_ = 0;  ///< KV heads of a layer, where budgets differ by head
};

}  // namespace kvlab
