// How fast the CUDA decoder is, beside what the same GPU can do in the same run. Metrics have
// names with their units: times the device's clock took, bytes that had to move, rates, shares.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "engine/decoder.hpp"

namespace kvlab {

/// A checkpoint, or the shape of one with random weights: exactly one of them.
struct BenchModel {
  std::filesystem::path directory, random_weights;
};

/// Steps of a batch; each kind of launch alone, too, over all layers.
struct DecodeBenchOptions {
  BenchModel model;
  int batch = 1;
  std::uint32_t context = 1024;  ///< tokens that each sequence has at first
  std::uint32_t steps = 64;
  /// Not empty: also times sampling one sequence with and without capture into this new trace.
  std::filesystem::path capture;
};
/// This one and the others throw std::runtime_error and std::invalid_argument as load_cuda_backend
/// does.
nlohmann::ordered_json bench_decode(const DecodeBenchOptions& options);

struct PrefillBenchOptions {
  BenchModel model;
  std::uint32_t tokens = 4096;
  std::uint32_t chunk = 2048;  ///< tokens at once
  ResolvedConfig cache;        ///< what the prompt is appended to
};
nlohmann::ordered_json bench_prefill(const PrefillBenchOptions& options);

/// A stream through a cache of fixed size, against a sliding window that is computed anew for every
/// token (a prompt of `budget` tokens): what StreamingLLM (Xiao et al. 2023, section 4.5) was
/// measured against.
struct StreamBenchOptions {
  BenchModel model;
  CacheConfig cache;  ///< the budget is not looked at
  std::vector<std::uint32_t> budgets;
  std::uint32_t steps = 64;
};
nlohmann::ordered_json bench_stream(const StreamBenchOptions& options);

/// Decoding behind a prompt with a cache that evicts, against the full cache: at one batch, and at
/// the largest that fits (Zhang et al. 2023, H2O, section 5.3).
struct EvictBenchOptions {
  BenchModel model;
  ResolvedConfig cache;  ///< with its budget in tokens
  int batch = 24;
  std::uint32_t prompt = 2048, decoded = 2048;  ///< tokens of each sequence
};
nlohmann::ordered_json bench_evict(const EvictBenchOptions& options);

/// Decode attention with and without observation and eviction: every combination, with 8 KV heads,
/// bf16. Keys stay at their positions unless a policy requests cache positions.
struct AttentionBenchOptions {
  std::vector<std::string> policies = {"window", "sink", "random", "lru", "h2o", "streaming_h2o"};
  std::vector<std::uint32_t> head_sizes = {128, 64}, groups = {1, 4, 8};
  std::vector<std::uint32_t> batches = {1, 4, 16};  ///< sequences
  std::uint32_t slots = 4096;                       ///< live tokens of each, the whole budget
};
/// A time is the mean of launches in a row over the caches of many layers, as a captured step has
/// them, so that none finds its keys in the L2 cache; the median of several such rows. What shows
/// the policy what was attended runs on a branch beside them, and ends within the row's time. Then
/// attention alone with keys and values in blocks, as the C library takes them, beside itself
/// without.
nlohmann::ordered_json bench_attention(const AttentionBenchOptions& options);

}  // namespace kvlab
