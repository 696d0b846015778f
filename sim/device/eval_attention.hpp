// Attention of the end-to-end evaluation on a CUDA device: a layer at a time, each configuration
// over queries, keys and values of its own.
#pragma once

#include "sim/device/head_tasks.hpp"

namespace kvlab {

/// Some configurations of one sequence. Every query's outputs are what its cache gives, evicted as
/// the replay evicts. Rows are padded to `tokens()` for each configuration.
class EvalAttention {
 public:
  /// `plan`: its measured queries are all, each a sample. `configs`: for it, at least one; they
  /// stay. Compiles the policies' walks where they are not yet. Throws std::runtime_error: too
  /// little memory.
  EvalAttention(const HeadTaskPlan& plan, std::span<const ResolvedConfig* const> configs,
                const Tables& tables, unsigned threads, cuda::Products& product, Streams& streams,
                Walks& walks);
  /// Bytes of device memory for each of such configurations.
  static std::size_t bytes_of_config(const HeadTaskPlan& plan,
                                     std::span<const ResolvedConfig* const> configs);
  /// A configuration's rows: the sequence's length, padded.
  static std::size_t rows(std::size_t tokens) { return padded_tokens(tokens); }

  /// Where keys and values before RoPE are expected [configuration, KV head, row, dim], of the
  /// model's type.
  std::byte* keys() const { return tasks_.parts().keys; }
  std::byte* values() const { return tasks_.parts().values; }
  /// Of a layer without a window. Queries before RoPE to outputs, both [configuration, row, query
  /// head, dim] of the model's type; may be the same memory. Enqueued on the first stream.
  void attend(std::uint32_t layer, const std::byte* queries, std::byte* outputs);
  /// The most that each KV head of a configuration holds, all layers' together.
  std::uint64_t kv_bytes_peak(std::size_t config) const { return kv_bytes_peak_[config]; }

 private:
  /// What the layer's tokens bring, made on the host of their keys and values.
  void send_features(std::uint32_t layer);

  const HeadTaskPlan& plan_;
  std::span<const ResolvedConfig* const> configs_;
  unsigned threads_;
  DeviceSweep sweep_;
  HeadTasks tasks_;
  Walks& walks_;
  std::vector<std::uint64_t> kv_bytes_peak_;
  std::size_t count_;  ///< head tasks
};

}  // namespace kvlab
