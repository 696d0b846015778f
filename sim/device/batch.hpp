// Head tasks of a trace that are on the device together.
#pragma once

#include <span>
#include <vector>

#include "sim/device/cuda_replay.hpp"
#include "sim/device/head_tasks.hpp"

namespace kvlab {

/// Runs head tasks: reads their tensors, replays them, and returns their metrics.
class Batch {
 public:
  Batch(const ReplayPlan& plan, const HeadTaskPlan& common, const DeviceSweep& sweep,
        const HeadTaskSizes& sizes, std::span<const HeadTask> tasks, const Tables& tables,
        cuda::Products& product, Streams& streams)
      : plan_(plan),
        sweep_(sweep),
        sizes_(sizes),
        tasks_(tasks),
        on_device_(common, sweep, sizes, tasks, tables, product, streams),
        parts_(on_device_.parts()) {}

  HeadTasks& tasks() { return on_device_; }
  void read();
  void replay(const Walks& walks);
  std::vector<std::vector<HeadOutcome>> outcomes() const;
  /// Computes the attention of every query. Returns the number of floating-point operations.
  double attend();
  /// From now on, stores the set of tokens to which each query attends, for show_sets(). Call
  /// before replay().
  void keep_sets();
  void show_sets(std::size_t first_task, const KeptWatcher& watcher) const;

 private:
  /// Computes the token features of head tasks `first` to first + count - 1, whose tensors have
  /// been read to `landed`, and sends the features to the device.
  void send_features(std::size_t first, std::size_t count, const float* landed) const;
  void read_projections();
  /// The gradients of one head task's queries, in the trace's dtype, with a scale for each query.
  struct ScaledGradients {
    std::vector<std::byte> values;
    // [query]: the factor by which the query's values have to be multiplied.
    std::vector<float> scales;
  };
  ScaledGradients scaled_gradients(const HeadTask& task,
                                   std::span<const std::uint32_t> queries) const;
  /// Computes two kinds of errors of the block: those of the sampled outputs after W_o, and the
  /// changes of log-likelihood by the gradients.
  void project_errors();
  /// The sums of all head tasks and configurations, copied to the host.
  struct BatchSums {
    std::vector<double> sums, errors;
    std::vector<kernels::ReplayProgress> progress;
  };
  LiveCounts counts_of(std::size_t cache, const kernels::ReplayProgress& walked) const;
  void separate_quantization(std::vector<HeadOutcome>& own) const;
  /// The outcome of one cache, without the metrics that need an ErrorProjection.
  HeadOutcome outcome(std::size_t cache, const BatchSums& batch_sums) const;

  const ReplayPlan& plan_;
  const DeviceSweep& sweep_;
  const HeadTaskSizes& sizes_;
  std::span<const HeadTask> tasks_;
  HeadTasks on_device_;
  const BatchParts& parts_;
  cuda::DeviceBuffer kept_;
};

}  // namespace kvlab
