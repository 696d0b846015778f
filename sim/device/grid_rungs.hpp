// The ladders of a grid as the kernels of a replay read them.
#pragma once

#include <map>
#include <vector>

#include "kernels/host/memory.hpp"
#include "kernels/replay/copies.hpp"
#include "policies/cache_config.hpp"

namespace kvlab {

class GridRungs {
 public:
  /// `own`: units are a configuration's own, and so are their copies of tokens.
  explicit GridRungs(bool own) : own_(own) {}

  /// To the rule of the cache that a configuration has at such a budget, if that is of a ladder.
  /// Throws std::invalid_argument: more rungs than a walk has.
  void add(const ResolvedConfig& config, std::uint32_t index, std::uint32_t budget,
           kernels::ReplayRule& rule);
  void send();
  const kernels::ReplayRung* rungs() const { return rungs_on_device_.as<kernels::ReplayRung>(); }
  const kernels::ReplayWay* ways() const { return ways_on_device_.as<kernels::ReplayWay>(); }
  /// As kernels::ReplayCopies::count.
  std::size_t copies() const;

 private:
  using Way = std::vector<const KvForm*>;
  std::uint32_t copy_of(std::uint32_t config, const Way& way);

  bool own_;
  std::vector<kernels::ReplayRung> rungs_;
  std::map<const std::vector<RungSlots>*, std::uint32_t> first_;  // of rungs_
  std::vector<std::vector<Way>> ways_;                            // [configuration or 0, copy]
  cuda::DeviceBuffer rungs_on_device_, ways_on_device_;
};

}  // namespace kvlab
