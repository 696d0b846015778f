// Some units of a trace on the device together.
#pragma once

#include <span>
#include <vector>

#include "sim/device/cuda_replay.hpp"
#include "sim/device/units.hpp"

namespace kvlab {

/// Units of a trace that are on the device together, from their tensors to their figures.
class Batch {
 public:
  Batch(const ReplayPlan& plan, const UnitsPlan& common, const Grid& grid, const UnitSizes& sizes,
        std::span<const ReplayUnit> units, const Tables& tables, cuda::Products& product,
        Streams& streams)
      : plan_(plan),
        grid_(grid),
        sizes_(sizes),
        units_(units),
        on_device_(common, grid, sizes, units, tables, product, streams),
        parts_(on_device_.parts()) {}

  Units& units() { return on_device_; }
  void read();
  void replay(const Walks& walks);
  std::vector<std::vector<HeadOutcome>> outcomes() const;
  /// Attention of every query. Returns its flops.
  double attend();
  /// Keeps what every query attended, from before replay() on.
  void keep_sets();
  void show_sets(std::size_t first_unit, const KeptWatcher& watcher) const;

 private:
  /// What tokens bring, of units whose tensors have landed.
  void send_columns(std::size_t first, std::size_t count, const float* landed) const;
  void read_projections();
  /// Of one unit's queries, in the trace's type.
  struct ScaledGradients {
    std::vector<std::byte> values;
    std::vector<float> scales;  // [query]: what they are to be multiplied with
  };
  ScaledGradients scaled_gradients(const ReplayUnit& unit,
                                   std::span<const std::uint32_t> queries) const;
  /// The errors of the block's sampled outputs behind W_o, and by gradients.
  void project_errors();
  /// Of all units and configurations, on the host.
  struct Figures {
    std::vector<double> sums, errors;
    std::vector<kernels::ReplayProgress> progress;
  };
  LiveCounts counts_of(std::size_t cache, const kernels::ReplayProgress& walked) const;
  void separate_codes(std::vector<HeadOutcome>& own) const;
  /// But for what an ErrorProjection makes.
  HeadOutcome outcome(std::size_t cache, const Figures& figures) const;

  const ReplayPlan& plan_;
  const Grid& grid_;
  const UnitSizes& sizes_;
  std::span<const ReplayUnit> units_;
  Units on_device_;
  const BatchParts& parts_;
  cuda::DeviceBuffer kept_;
};

}  // namespace kvlab
