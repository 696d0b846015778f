// Head tasks on the device: their tensors, a block's rows, their caches' walks.
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

/// A stream, and branches of it that run side by side.
class Streams {
 public:
  cudaStream_t first() const { return first_.get(); }
  void synchronize() const { first_.synchronize("replaying"); }
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
  cuda::Event begin_, ends_[16];
};

/// What the head tasks of a replay, or of an end-to-end evaluation, have in common.
struct HeadTaskPlan {
  const ModelShape& shape;
  const Rope& rope;
  const RopeTable& angles;  ///< of all tokens
  const HeadArithmetic& arithmetic;
  const MeasuredQueries& measured;
  std::uint32_t tokens, sequence;
  const OutputProjections* output = nullptr;  ///< for features that are computed from them
};

/// Pairs of dimensions of a head, padded: see kernels::ReplayShape.
inline int pairs_of(const ModelShape& shape) {
  return kernels::ReplayShape{.head_size = static_cast<int>(shape.head_size)}.pairs();
}

inline constexpr std::uint32_t kProductAlignment = 16;  ///< of what is multiplied, bytes

/// Tokens of a head task as its tensors have them: rows of products begin aligned.
constexpr std::size_t padded_tokens(std::size_t tokens) { return (tokens + 15) / 16 * 16; }

/// What all head tasks read.
struct Tables {
  explicit Tables(const HeadTaskPlan& plan);
  cuda::DeviceBuffer rope, coarse, fine, measured, named;
};

/// The sizes of such a head task, of a sweep of `configs`.
HeadTaskSizes sizes_of(const HeadTaskPlan& plan, const DeviceSweep& sweep, std::size_t configs);
/// How many of them, a multiple of `together`, fit beside `landing` bytes. Throws
/// std::runtime_error where not even so many do.
std::size_t tasks_at_once(const HeadTaskSizes& sizes, std::size_t landing, std::size_t together);

/// A matrix for each head task: how far apart rows and head tasks are, in elements.
struct HeadTaskMatrix {
  void* data;
  std::size_t row, task;
};
/// As cuda::ProductArgs has it, for each head task.
struct HeadTaskProduct {
  kernels::Type type;
  std::size_t rows, n, k;
  HeadTaskMatrix x, w, y;
  bool w_by_k = false;
  cuda::ProductArgs::Output output = cuda::ProductArgs::Output::float32;
  bool tf32 = false;
  std::uint32_t alignment = kProductAlignment;
};

/// Head tasks that are on the device together. All is enqueued on the first stream.
class HeadTasks {
 public:
  /// `tasks`: their KV heads; of each of `layers` that they are of one after another.
  HeadTasks(const HeadTaskPlan& plan, const DeviceSweep& sweep, const HeadTaskSizes& sizes,
            std::span<const HeadTask> tasks, const Tables& tables, cuda::Products& product,
            Streams& streams, std::size_t layers = 1);

  /// The walks that its members need.
  std::vector<Walk> walks() const;
  /// Copies a head task's keys or values, a row for each token, to where the walks read them.
  void copy(const kernels::ReplayVectors& from, std::size_t task, Part part);
  /// Makes all else of keys, and of the queries of one head of the group.
  void take_keys(const kernels::ReplayVectors& from, std::size_t task);
  void take_queries(const kernels::ReplayVectors& from, std::size_t task, std::uint32_t head);
  /// Of all head tasks' keys and values, where tier plans want it.
  void make_copies();
  /// The caches as they are before the first token, with no metrics.
  void clear();
  /// Takes the head tasks to be those of the n-th layer.
  void set_layer(std::size_t n) {
    parts_.block.sweep.rules = rules_.as<kernels::ReplayRule>() + n * count_ * sizes_.configs;
  }
  /// From now on, as kernels' arguments have them; else none are.
  void keep_bits(std::uint32_t* kept_bits) { kept_bits_ = kept_bits; }
  /// Queries first, first + 1, …, `count` of them: rows, walks, outputs. `outputs`: where they go
  /// themselves, as kernels::ReplayOutputsArgs has them; or null.
  void replay_block(const Walks& walks, std::uint32_t first, std::uint32_t count,
                    void* outputs = nullptr);
  /// What their kept sets change, and the block's metrics.
  void change();
  void sum_metrics();
  /// With such keys, as they are for rows.
  void multiply_rows(std::uint32_t first, std::uint32_t count, std::byte* keys,
                     cuda::ProductArgs::Output output = cuda::ProductArgs::Output::float32);
  void multiply(const HeadTaskProduct& of);
  /// Rounds of thread blocks of one query, over the policies.
  int waves(const Walks& walks) const;

  const HeadTaskSizes& sizes() const { return sizes_; }
  const BatchParts& parts() const { return parts_; }
  cudaStream_t stream() const { return streams_.first(); }

 private:
  kernels::ReplayRotateArgs rotation_of(const kernels::ReplayVectors& from) const;
  kernels::ReplayKeepArgs keep_args() const;
  kernels::ReplayKeptArgs kept_args() const;
  /// Calls use(args, plan) with what the members' walk takes.
  template <class Use>
  void with_walk(const Members& members, Use use) const;
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
