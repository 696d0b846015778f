// How fast decode attention is with and without observation and eviction, beside what the card can
// read.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "policies/policy.hpp"

namespace kvlab {

/// Rows of a table: every combination, with 8 KV heads, bf16.
struct AttentionBenchOptions {
  std::vector<std::string> policies = {"window", "sink", "random", "lru", "h2o", "streaming_h2o"};
  std::vector<std::uint32_t> head_sizes = {128, 64}, groups = {1, 4, 8};
  std::vector<std::uint32_t> batches = {1, 4, 16};  ///< sequences
  std::uint32_t slots = 4096;                       ///< live tokens of each, the whole budget
};

/// One policy's attention. Keys stay at their positions unless it asks for squeezed ones.
struct EvictingTime {
  std::string policy;
  Positions positions;
  double microseconds = 0;
};

struct AttentionTime {
  std::uint32_t head_size, group, batch, slots;
  std::uint64_t bytes = 0;  ///< of keys and values
  double microseconds = 0;  ///< of decode attention alone
  std::vector<EvictingTime> evicting;

  double bytes_per_second() const { return static_cast<double>(bytes) / (microseconds * 1e-6); }
};

struct AttentionBench {
  std::string device;
  double read_bytes_per_second = 0;  ///< of a large read, in the same run
  std::vector<AttentionTime> times;
};
/// A time is the mean of launches in a row over the caches of many layers, as a captured step has
/// them, so that none finds its keys in the L2 cache; the median of several such rows. What shows
/// the policy what was attended runs on a branch beside them, and ends within the row's time.
/// Throws std::runtime_error without a device or memory, std::invalid_argument for what does not
/// exist.
AttentionBench bench_attention(const AttentionBenchOptions& options);

}  // namespace kvlab
