// Attention of the end-to-end evaluation on a CUDA device. It handles one layer at a time, and each
// configuration has separate queries, keys and values.
#pragma once

#include "sim/device/head_tasks.hpp"

namespace kvlab {

/// Some configurations of one sequence. Every query attends to the tokens in the cache of its
/// configuration, and the caches evict tokens as in a replay. Each configuration has rows(tokens)
/// rows.
class EvalAttention {
 public:
  /// In `plan.measured`, all queries must be measured and sampled. `configs`: at least one; they
  /// must outlive this object. Compiles the walks of the policies if necessary. Throws
  /// std::runtime_error if the device memory is too small.
  EvalAttention(const HeadTaskPlan& plan, std::span<const ResolvedConfig* const> configs,
                const Tables& tables, unsigned threads, cuda::Products& product, Streams& streams,
                Walks& walks);
  /// Bytes of device memory per configuration.
  static std::size_t bytes_of_config(const HeadTaskPlan& plan,
                                     std::span<const ResolvedConfig* const> configs);
  /// Number of rows of a configuration: the sequence's length, padded.
  static std::size_t rows(std::size_t tokens) { return padded_tokens(tokens); }

  /// Buffers for keys and values before RoPE: [configuration, KV head, row, dim] in the model's
  /// dtype.
  std::byte* keys() const { return tasks_.parts().keys; }
  std::byte* values() const { return tasks_.parts().values; }
  /// Computes the attention of a layer without a window. `queries` (before RoPE) and `outputs` are
  /// [configuration, row, query head, dim] in the model's dtype, and may be the same memory. The
  /// work is enqueued on the first stream.
  void attend(std::uint32_t layer, const std::byte* queries, std::byte* outputs);
  /// Peak bytes of keys and values of a configuration, summed over KV heads and layers.
  std::uint64_t kv_bytes_peak(std::size_t config) const { return kv_bytes_peak_[config]; }

 private:
  /// Computes the features of the layer's tokens on the host, from keys and values, and sends them
  /// to the device.
  void send_features(std::uint32_t layer);

  const HeadTaskPlan& plan_;
  std::span<const ResolvedConfig* const> configs_;
  unsigned threads_;
  DeviceSweep sweep_;
  HeadTasks tasks_;
  Walks& walks_;
  std::vector<std::uint64_t> kv_bytes_peak_;
  std::size_t count_;  ///< number of head tasks
};

}  // namespace kvlab
