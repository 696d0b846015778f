// The tier plans of a sweep, in the layout that the kernels of a replay read.
#pragma once

#include <map>
#include <vector>

#include "kernels/host/memory.hpp"
#include "kernels/replay/copies.hpp"
#include "policies/cache_config.hpp"

namespace kvlab {

class SweepTiers {
 public:
  /// `own`: whether each configuration has separate head tasks, and therefore separate quantized
  /// copies of the tokens.
  explicit SweepTiers(bool own) : own_(own) {}

  /// If `config` has a tier plan, adds the tiers of its cache at `budget` to `rule`. Throws
  /// std::invalid_argument if there are more tiers than a walk supports.
  void add(const ResolvedConfig& config, std::uint32_t index, std::uint32_t budget,
           kernels::ReplayRule& rule);
  void send();
  const kernels::ReplayTier* tiers() const { return tiers_on_device_.as<kernels::ReplayTier>(); }
  const kernels::ReplayDemotionPath* paths() const {
    return paths_on_device_.as<kernels::ReplayDemotionPath>();
  }
  /// See kernels::ReplayCopies::count.
  std::size_t copies() const;

 private:
  using Path = std::vector<KvFormat>;
  std::uint32_t copy_of(std::uint32_t config, const Path& path);

  bool own_;
  std::vector<kernels::ReplayTier> tiers_;
  // Key: the tiers of a tier plan. Value: the index of its first tier in tiers_.
  std::map<const std::vector<TierSlots>*, std::uint32_t> first_;
  // [configuration, copy] if each configuration has separate copies; otherwise [0, copy].
  std::vector<std::vector<Path>> paths_;
  cuda::DeviceBuffer tiers_on_device_, paths_on_device_;
};

}  // namespace kvlab
