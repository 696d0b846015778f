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
    bool squeezed, largest, by_layer;  ///< as kernels::ReplayArgs has them
    bool rungs;                        ///< all are of ladders
    int size_class;
    bool operator==(const Kind&) const = default;
  };
  Kind kind;
  std::vector<std::int32_t> configs = {};
  std::uint32_t most_slots = 0, most_rungs = 0;
  cuda::DeviceBuffer on_device = {};
  const void* walk = nullptr;  ///< its kernel, once loaded
};

/// The grid as the kernels read it.
class Grid {
 public:
  /// `tokens`: of the sequence. `walks_all`: windows too, of which else nobody knows what they keep
  /// of a named span. `wants_twins`: each configuration with codes has another, of the same tokens
  /// in 16 bit. `own_units`: as kernels::ReplayArgs has them.
  Grid(std::span<const ResolvedConfig* const> configs, std::uint32_t tokens, bool walks_all,
       bool wants_twins, int own_units = 0);

  void describe(kernels::ReplayArgs& args) const;

  /// The columns of configurations that name the same and admit alike.
  struct Columns {
    const ResolvedConfig* like;  ///< one of them
    std::uint32_t first;         ///< as ReplayRule::columns
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
  int slot_stride = 8;
  bool squeezed = false;
  bool by_layer = false;  ///< some keep one set for a layer: units are whole layers

 private:
  void add_member(const ResolvedConfig& config, std::int32_t index,
                  const kernels::ReplayRule& rule);
  void add_twins(std::vector<kernels::ReplayRule>& rules);
  std::vector<kernels::ReplayRule> rules_by_head(std::span<const kernels::ReplayRule> rules,
                                                 std::span<const ResolvedConfig* const> configs);
  void send_sets(std::span<const kernels::ReplayRule> rules);
  /// Where they are among a unit's.
  std::uint32_t add_columns(const ResolvedConfig& config);

  cuda::DeviceBuffer rules_, admissions_, params_, sets_;
  int tiles_ = 0, coded_tiles_ = 0, own_units_, rule_heads_ = 0;
};

}  // namespace kvlab
