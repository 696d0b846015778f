// Head tasks on the device: their tensors, the rows of a block, and the walks of their caches.
#pragma once

#include <span>
#include <vector>

#include "kernels/host/product.hpp"
#include "sim/device/batch_memory.hpp"
#include "sim/device/sweep.hpp"
#include "sim/device/walks.hpp"
#include "sim/metrics.hpp"
#include "sim/replay.hpp"

namespace kvlab {

/// A CUDA stream, and branches of it whose work runs at the same time.
class Streams {
 public:
  cudaStream_t first() const { return first_.get(); }
  void synchronize() const { first_.synchronize("replaying"); }
  cudaStream_t branch(std::size_t i) const { return branches_[i % std::size(branches_)].get(); }
  /// The branches wait for the work that is now enqueued on the first stream.
  void fork() {
    begin_.record(first());
    for (const cuda::Stream& branch : branches_) begin_.hold(branch.get(), "waiting for a stream");
  }
  /// The first stream waits for the work that is now enqueued on the branches.
  void join() {
    for (std::size_t i = 0; i < std::size(branches_); ++i) {
      ends_[i].record(branches_[i].get());
      ends_[i].hold(first(), "waiting for a stream");
    }
  }

 private:
  cuda::Stream first_, branches_[16];
  cuda::Event begin_, ends_[16];
};

/// The data that all head tasks of a replay or of an end-to-end evaluation have in common.
struct HeadTaskPlan {
  const ModelShape& shape;
  const Rope& rope;
  const RopeTable& angles;  ///< for all tokens
  const HeadArithmetic& arithmetic;
  const MeasuredQueries& measured;
  std::uint32_t tokens, sequence;
  const OutputProjections* output = nullptr;  ///< needed only if a token feature depends on it
};

/// Pairs of dimensions of a head, padded: see kernels::ReplayShape.
inline int pairs_of(const ModelShape& shape) {
  return kernels::ReplayShape{.head_size = static_cast<int>(shape.head_size)}.pairs();
}

/// Alignment of the operands of products, in bytes.
inline constexpr std::uint32_t kProductAlignment = 16;

/// Number of tokens of a head task, padded to a multiple of 16, so that each row of a product
/// begins at an aligned address.
constexpr std::size_t padded_tokens(std::size_t tokens) { return (tokens + 15) / 16 * 16; }

/// Tables that all head tasks read.
struct Tables {
  explicit Tables(const HeadTaskPlan& plan);
  cuda::DeviceBuffer rope, coarse, fine, measured, named;
};

/// The sizes of one head task, for a sweep of `configs` configurations.
HeadTaskSizes sizes_of(const HeadTaskPlan& plan, const DeviceSweep& sweep, std::size_t configs);
/// The number of head tasks that fit into device memory at the same time, if `landing` bytes are
/// needed for other data. It is a multiple of `together`. Throws std::runtime_error if fewer than
/// `together` fit.
std::size_t tasks_at_once(const HeadTaskSizes& sizes, std::size_t landing, std::size_t together);

/// A matrix for each head task. `row` and `task` are the distances between rows and between head
/// tasks, in elements.
struct HeadTaskMatrix {
  void* data;
  std::size_t row, task;
};
/// The arguments of cuda::ProductArgs, for one product in each head task.
struct HeadTaskProduct {
  kernels::Type type;
  std::size_t rows, n, k;
  HeadTaskMatrix x, w, y;
  bool w_by_k = false;
  cuda::ProductArgs::Output output = cuda::ProductArgs::Output::float32;
  bool tf32 = false;
  std::uint32_t alignment = kProductAlignment;
};

/// Head tasks that are on the device together. All work is enqueued on the first stream.
class HeadTasks {
 public:
  /// `tasks`: the KV heads of `layers` layers, in order. The head tasks of one layer are on the
  /// device together; set_layer() selects the layer.
  HeadTasks(const HeadTaskPlan& plan, const DeviceSweep& sweep, const HeadTaskSizes& sizes,
            std::span<const HeadTask> tasks, const Tables& tables, cuda::Products& product,
            Streams& streams, std::size_t layers = 1);

  /// The walks that the members of the sweep need.
  std::vector<Walk> walks() const;
  /// Copies the keys or the values of a head task to the buffers that the kernels read, one row per
  /// token.
  void copy(const kernels::ReplayVectors& from, std::size_t task, Part part);
  /// Fills the buffers whose data is computed from a head task's keys. take_queries() fills the
  /// buffers whose data is computed from the queries of query head `head` of the group.
  void take_keys(const kernels::ReplayVectors& from, std::size_t task);
  void take_queries(const kernels::ReplayVectors& from, std::size_t task, std::uint32_t head);
  /// Makes the dequantized copies of all keys and values that tier plans need.
  void make_copies();
  /// Resets the caches to their state before the first token, and the sums of the metrics to 0.
  void clear();
  /// Selects the rules of the n-th layer.
  void set_layer(std::size_t n) {
    parts_.block.sweep.rules = rules_.as<kernels::ReplayRule>() + n * count_ * sizes_.configs;
  }
  /// From now on, stores the sets of kept tokens to `kept_bits`, in the layout of the kernels'
  /// arguments. With null, stops storing them.
  void keep_bits(std::uint32_t* kept_bits) { kept_bits_ = kept_bits; }
  /// Runs queries [first, first + count): computes their rows, runs the walks, and computes their
  /// outputs. `outputs`: where to store the outputs (see kernels::ReplayOutputsArgs); may be null.
  void replay_block(const Walks& walks, std::uint32_t first, std::uint32_t count,
                    void* outputs = nullptr);
  /// Computes the changes of log-likelihood from the sets of kept tokens. sum_metrics() computes
  /// the metrics of the block.
  void change();
  void sum_metrics();
  /// Multiplies queries [first, first + count) by `keys`, and stores the products in the layout of
  /// rows.
  void multiply_rows(std::uint32_t first, std::uint32_t count, std::byte* keys,
                     cuda::ProductArgs::Output output = cuda::ProductArgs::Output::float32);
  void multiply(const HeadTaskProduct& product);
  /// Number of waves of thread blocks per query, summed over the policies.
  int waves(const Walks& walks) const;

  const HeadTaskSizes& sizes() const { return sizes_; }
  const BatchParts& parts() const { return parts_; }
  cudaStream_t stream() const { return streams_.first(); }

 private:
  kernels::ReplayRotateArgs rotation_of(const kernels::ReplayVectors& from) const;
  kernels::ReplayKeepArgs keep_args() const;
  kernels::ReplayKeptArgs kept_args() const;
  /// Calls use(args, plan) with the arguments and the launch plan of the walk kernel of `members`.
  template <class Use>
  void visit_walk(const Members& members, Use use) const;
  void multiply_terms(std::uint32_t first, std::uint32_t count);
  void multiply_terms(std::uint32_t begin, std::uint32_t end, std::byte* values, int copy,
                      cuda::ProductArgs::Output output);
  void make_rows(std::uint32_t first, std::uint32_t count);
  void multiply_parts(std::uint32_t first, std::uint32_t count);
  void walk(const Walks& walks);

  const HeadTaskPlan& plan_;
  const DeviceSweep& sweep_;
  const HeadTaskSizes sizes_;
  std::size_t count_;
  cuda::Products& product_;
  Streams& streams_;
  const Tables& tables_;
  BatchParts parts_{};
  std::uint32_t* kept_bits_ = nullptr;
  cuda::DeviceBuffer memory_, rules_;
};

}  // namespace kvlab
