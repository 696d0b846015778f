// Some units of a replay on the device together.
#pragma once

#include <span>
#include <vector>

#include "kernels/host/product.hpp"
#include "sim/device/batch_memory.hpp"
#include "sim/device/cuda_replay.hpp"
#include "sim/device/grid.hpp"
#include "sim/device/walks.hpp"

namespace kvlab {

/// A stream, and branches of it that run side by side.
class Streams {
 public:
  Streams() {
    for (std::size_t i = 0; i < std::size(branches_); ++i) ends_.emplace_back();
  }
  cudaStream_t first() const { return first_.get(); }
  cudaStream_t branch(std::size_t i) const { return branches_[i % std::size(branches_)].get(); }
  /// Branches go on from where the first stream is.
  void fork() {
    begin_.record(first());
    for (const cuda::Stream& branch : branches_) begin_.hold(branch.get(), "waiting for a stream");
  }
  /// The first stream goes on when all branches have ended.
  void join() {
    for (std::size_t i = 0; i < std::size(branches_); ++i) {
      ends_[i].record(branches_[i].get());
      ends_[i].hold(first(), "waiting for a stream");
    }
  }

 private:
  cuda::Stream first_, branches_[16];
  cuda::Event begin_;
  std::vector<cuda::Event> ends_;
};

/// What all units read.
struct Tables {
  cuda::DeviceBuffer rope, coarse, fine, span, named;
};

/// Units that are on the device together, from their tensors to their figures.
class Batch {
 public:
  Batch(const ReplayPlan& plan, const Grid& grid, const UnitSizes& sizes,
        std::span<const ReplayUnit> units, const Tables& tables, cuda::Products& product,
        Streams& streams)
      : plan_(plan),
        grid_(grid),
        sizes_(sizes),
        units_(units),
        product_(product),
        streams_(streams),
        stream_(streams.first()) {
    const ModelShape& shape = plan.trace.shape();
    args_.shape = {.units = static_cast<int>(units.size()),
                   .tokens = static_cast<int>(sizes.tokens),
                   .group = static_cast<int>(shape.group()),
                   .head_size = static_cast<int>(shape.head_size),
                   .rotated = static_cast<int>(plan.trace.header().rope.rotated()),
                   .softmax_scale = plan.arithmetic.softmax_scale,
                   .rounding = type_of(plan.arithmetic.rounding),
                   .threshold16 = plan.arithmetic.threshold16};
    args_.tensors.type = type_of(shape.dtype);
    args_.tensors.rope = tables.rope.as<float2>();
    args_.tensors.coarse = tables.coarse.as<float2>();
    args_.tensors.fine = tables.fine.as<float2>();
    args_.span = {tables.span.as<std::int32_t>(),
                  static_cast<int>(plan.span.size()),
                  static_cast<int>(plan.span.blocks()),
                  static_cast<int>(plan.span.sample_every()),
                  tables.named.as<int2>(),
                  static_cast<int>(plan.span.named().size())};
    args_.sequence = plan.sequence;
    grid.describe(args_);
    allocate();
  }

  /// The walks that its members need.
  std::vector<Walk> walks() const;
  void read();
  void replay(const Walks& walks);
  std::vector<std::vector<HeadOutcome>> outcomes() const;
  /// Of one query, over the policies.
  int waves(const Walks& walks) const;
  /// Attention of every query. Returns its flops.
  double attend();
  /// Keeps what every query attended, from before replay() on.
  void keep_sets();
  void show_sets(std::size_t first_unit, const KeptWatcher& watcher) const;

 private:
  void allocate();
  kernels::ReplayArgs args_of(const Members& members) const;
  Walk walk_of(const Members& members) const;
  void rotate(const float* from, std::size_t unit, Part part, std::uint32_t head);
  void make_rows(std::uint32_t first, std::uint32_t count);
  void multiply_parts(std::uint32_t first, std::uint32_t count);
  void multiply(kernels::Type type, const void* queries, const void* keys, float* to,
                std::uint32_t first, std::uint32_t count);
  void read_projections();
  /// The errors of the block's sampled outputs behind W_o, and by gradients.
  void project_errors();
  /// Of all units and configurations, on the host.
  struct Figures {
    std::vector<double> sums, errors;
    std::vector<float> projected;
    std::vector<std::uint32_t> zeros;
    std::vector<double2> named;
    std::vector<kernels::ReplayProgress> progress;
  };
  HeadOutcome outcome(std::size_t figure, const Figures& figures) const;

  const ReplayPlan& plan_;
  const Grid& grid_;
  const UnitSizes& sizes_;
  std::span<const ReplayUnit> units_;
  cuda::Products& product_;
  Streams& streams_;
  cudaStream_t stream_;
  kernels::ReplayArgs args_{};
  BatchParts parts_{};
  cuda::DeviceBuffer memory_, layers_, kv_heads_, kept_;
};

}  // namespace kvlab
