// The configurations of a replay as the kernels read them, and what they take of memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <map>
#include <optional>
#include <string_view>
#include <vector>

#include "kernels/host/memory.hpp"
#include "kernels/replay/replay.hpp"
#include "sim/head_replayer.hpp"

namespace kvlab {

kernels::Type type_of(const std::optional<Dtype>& rounding);
/// Null for a policy that is not compiled for the device.
const kernels::ReplayPolicy* find_policy(std::string_view name);

/// Configurations of one policy and one kind of positions, and of about the same size.
struct Members {
  const kernels::ReplayPolicy* policy;
  bool squeezed;
  int size_class;
  std::vector<std::int32_t> configs;
  std::uint32_t most_slots = 0;
  cuda::DeviceBuffer on_device;
};

/// The grid as the kernels read it: the same for every unit.
class Grid {
 public:
  explicit Grid(const ReplayPlan& plan);

  void describe(kernels::ReplayArgs& args) const;

  /// What the replay of a cache comes to whatever it observes.
  struct Counts {
    std::uint64_t evictions;
    std::uint32_t most_live, live;
  };

  std::vector<Members> members;
  std::vector<std::int32_t> windows;  ///< configurations that evict the oldest first
  cuda::DeviceBuffer windows_on_device;
  std::map<std::int32_t, Counts> window_counts;
  std::int64_t unit_slots = 0;
  int slot_stride = 8;
  bool squeezed = false;

 private:
  void add_member(const kernels::ReplayPolicy& policy, bool is_squeezed, std::int32_t config,
                  std::uint32_t slots);

  cuda::DeviceBuffer rules_, admissions_, params_, sets_;
  int tiles_ = 0;
};

/// Device memory of some units, in the order of `bytes_of_unit`.
struct UnitSizes {
  std::size_t tokens, group, dim, pairs, quads, block, slots, configs, windows, samples,
      block_samples;
  std::size_t slot_stride, product_bytes, element_bytes;
  bool squeezed, rounds;

  std::size_t tensors() const {
    const std::size_t vectors = tokens * (group + 1) * dim;
    return vectors * product_bytes + tokens * group * dim * 4 + 2 * tokens * dim * element_bytes +
           (unrounded() ? tokens * 3 * dim * 4 : 0) +
           (squeezed ? tokens * (group * dim * 4 + 2 * pairs * element_bytes + 4) : 0);
  }
  bool unrounded() const { return squeezed && rounds; }
  std::size_t products() const { return block * group * tokens * 4; }
  std::size_t row() const { return block * quads * tokens * 16; }
  std::size_t rows() const {
    return (unrounded() ? 2 : 1) * (products() + row()) + block * (group * dim * 4 + quads * 64) +
           (unrounded() ? query_parts() : 0) + (squeezed ? fragments() + block * quads * 16 : 0);
  }
  std::size_t query_parts() const { return block * group * 3 * dim * 4; }
  std::size_t fragments() const { return block * quads * pairs * 32; }
  std::size_t planes() const { return squeezed ? kernels::kReplayAhead : 1; }
  std::size_t caches() const {
    return slots * (slot_stride + 4 * 4 + 8 + sizeof(Observation) + 16 * quads * planes());
  }
  std::size_t words() const { return (tokens + 31) / 32; }
  std::size_t kept() const {
    return configs * block_samples *
           (words() * 4 + sizeof(kernels::ReplaySample) + group * dim * 4 +
            kernels::kMostReplayGroup * sizeof(double2));
  }
  std::size_t figures() const {
    return configs * (kernels::kReplaySums * 4 * quads * 8 * kernels::kReplaySpanBlocks +
                      samples * 16 + 4 * 4 * quads + sizeof(kernels::ReplayProgress)) +
           window_figures();
  }
  std::size_t window_figures() const { return windows * block * 4 * quads * 16; }
  std::size_t bytes() const { return tensors() + rows() + caches() + kept() + figures(); }

  /// A unit's part of the trace in float32, where it lands; so many units land at a time.
  std::size_t landing() const { return (group + 2) * tokens * dim * sizeof(float); }
  std::size_t land_at_once(std::size_t units, std::size_t threads) const {
    constexpr std::size_t kBytes = std::size_t{256} << 20;
    return std::clamp<std::size_t>(kBytes / landing(), 1, std::min(units, threads));
  }
};

}  // namespace kvlab
