// Benchmarks of the CUDA decoder. The same run also measures limits of the GPU, with which the
// results are compared. Metrics are times (by the device's clock), bytes that have to be moved,
// rates, and rates as a share of a limit. The names of metrics contain the units.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "engine/decoder.hpp"

namespace kvlab {

/// The model of a benchmark. Exactly one of the two members is set: `directory` is a checkpoint,
/// and `random_weights` is a folder whose config.json gives the shape of a model with random
/// weights.
struct BenchModel {
  std::filesystem::path directory, random_weights;
};

/// Options of the benchmark that times the decode steps of a batch. It also times each kind of
/// kernel launch by itself, over all layers.
struct DecodeBenchOptions {
  BenchModel model;
  int batch = 1;
  std::uint32_t context = 1024;  ///< tokens of each sequence at the start
  std::uint32_t steps = 64;
  /// Path of a new trace. If not empty, the benchmark also times sampling of one sequence, once
  /// without capture and once with capture to this trace.
  std::filesystem::path capture;
};
/// All benchmarks throw std::runtime_error and std::invalid_argument as load_cuda_backend() does.
nlohmann::ordered_json bench_decode(const DecodeBenchOptions& options);

struct PrefillBenchOptions {
  BenchModel model;
  std::uint32_t tokens = 4096;
  std::uint32_t chunk = 2048;  ///< tokens of a prefill chunk
  ResolvedConfig cache;        ///< the cache that the prompt is appended to
};
nlohmann::ordered_json bench_prefill(const PrefillBenchOptions& options);

/// Times a stream of tokens through a cache of fixed size. The baseline is a sliding window that is
/// recomputed for every token, as a prompt of `budget` tokens. StreamingLLM (Xiao et al. 2023,
/// section 4.5) uses the same baseline.
struct StreamBenchOptions {
  BenchModel model;
  CacheConfig cache;  ///< its budget is ignored
  std::vector<std::uint32_t> budgets;
  std::uint32_t steps = 64;
};
nlohmann::ordered_json bench_stream(const StreamBenchOptions& options);

/// Times decoding after a prompt with caches that evict, and compares each with the full cache, at
/// one batch size and at the largest batch size that fits (Zhang et al. 2023, H2O, section 5.3).
struct EvictBenchOptions {
  BenchModel model;
  std::vector<CacheConfig> configs;  ///< all of them evict
  int batch = 24;
  std::uint32_t prompt = 2048, decoded = 2048;  ///< tokens of each sequence
  /// Called after each configuration, with its entry in the result's `configurations`; may be null.
  std::function<void(const nlohmann::ordered_json&)> progress = {};
};
/// Measures the full cache once. If a configuration cannot run, its entry in the result has the
/// reason. If none can run, throws the error of the first.
nlohmann::ordered_json bench_evict(const EvictBenchOptions& options);

/// Times decode attention with and without observation and eviction, for every combination of the
/// options, with 8 KV heads in bf16. Keys stay at their original positions unless a policy uses
/// cache positions.
struct AttentionBenchOptions {
  std::vector<std::string> policies = {"window", "sink", "random", "lru", "h2o", "streaming_h2o"};
  std::vector<std::uint32_t> head_sizes = {128, 64}, groups = {1, 4, 8};
  std::vector<std::uint32_t> batches = {1, 4, 16};  ///< sequences
  std::uint32_t slots = 4096;  ///< live tokens of each sequence, and its budget
};
/// Each time is per layer, measured over consecutive launches for the caches of many layers. No
/// launch finds its keys in the L2 cache, as in a captured decode step. The result is the median
/// over several such series of launches. Observation runs on a parallel branch of the captured
/// graph, and a series ends when its observation has ended. In addition, attention alone is timed
/// with keys and values in blocks of slots, as the C library accepts them, and without blocks.
nlohmann::ordered_json bench_attention(const AttentionBenchOptions& options);

/// A decode step that fetches keys and values from host memory. Each layer fetches scattered rows,
/// whose indices are in a list, and then reads device memory.
struct LinkStep {
  std::uint32_t layers = 1;
  std::uint32_t rows = 0;        ///< rows that a layer fetches
  std::uint32_t row_bytes = 0;   ///< bytes of a row, which is a key and a value
  std::uint64_t read_bytes = 0;  ///< bytes of device memory that a layer reads
};
/// Times the link between the host's pinned memory and the device: contiguous copies, kernels that
/// fetch the rows of a list, the same rows as batches of copies, and `steps`.
struct LinkBenchOptions {
  std::uint64_t pool_bytes = std::uint64_t{4} << 30;  ///< host memory over which rows are scattered
  std::vector<LinkStep> steps;
};
nlohmann::ordered_json bench_link(const LinkBenchOptions& options);

}  // namespace kvlab
