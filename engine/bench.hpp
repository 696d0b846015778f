// How fast the CUDA decoder is, beside what the same card can do.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "engine/decoder.hpp"

namespace kvlab {

/// A checkpoint, or the shape of one with random weights: exactly one of them.
struct BenchModel {
  std::filesystem::path directory, random_weights;
};

struct DecodeBenchOptions {
  BenchModel model;
  int batch = 1;
  std::uint32_t context = 1024;  ///< tokens that each sequence has at first
  std::uint32_t steps = 64;
  /// Not empty: also times sampling one sequence with and without capture into this new trace.
  std::filesystem::path capture;
};

/// One kind of launch, over all layers.
struct PartTime {
  std::string name;
  std::uint64_t bytes = 0;  ///< that it has to move
  double milliseconds = 0;
};

struct DecodeBench {
  std::string model, dtype, device;
  double step_milliseconds = 0;
  double tokens_per_second = 0;
  std::uint64_t step_bytes = 0;      ///< weights once, keys and values of every live token
  double read_bytes_per_second = 0;  ///< of a large read, in the same run
  std::vector<PartTime> parts;
  std::string logits_xxh3;  ///< of all rows after the last step
  double plain_tokens_per_second = 0, captured_tokens_per_second = 0;  ///< 0: not asked for

  double step_bytes_per_second() const {
    return static_cast<double>(step_bytes) / (step_milliseconds * 1e-3);
  }
};
/// Throws std::runtime_error and std::invalid_argument as load_cuda_backend does.
DecodeBench bench_decode(const DecodeBenchOptions& options);

struct PrefillBenchOptions {
  BenchModel model;
  std::uint32_t tokens = 4096;
  std::uint32_t chunk = 2048;  ///< tokens at once
};

struct PrefillBench {
  std::string model, dtype, device;
  double milliseconds = 0;
  double tokens_per_second = 0;
  double flops = 0;                    ///< of the products and of causal attention
  double matrix_flops_per_second = 0;  ///< of a large product, in the same run
  std::string logits_xxh3;             ///< of the last token

  double flops_per_second() const { return flops / (milliseconds * 1e-3); }
};
PrefillBench bench_prefill(const PrefillBenchOptions& options);

/// A stream through a cache of fixed size, against a sliding window that is computed anew for every
/// token: what StreamingLLM (Xiao et al. 2023, section 4.5) was measured against.
struct StreamBenchOptions {
  BenchModel model;
  CacheConfig cache;  ///< the budget is not looked at
  std::vector<std::uint32_t> budgets;
  std::uint32_t steps = 64;
};

struct StreamPoint {
  std::uint32_t budget = 0;
  double step_milliseconds = 0;       ///< of the stream, its cache full
  double recompute_milliseconds = 0;  ///< a prompt of `budget` tokens, which one token costs there
  std::uint64_t device_bytes = 0;     ///< taken from the driver, weights included

  double ratio() const { return recompute_milliseconds / step_milliseconds; }
};

struct StreamBench {
  std::string model, dtype, device;
  std::uint64_t weight_bytes = 0;
  std::vector<StreamPoint> points;
};
StreamBench bench_stream(const StreamBenchOptions& options);

/// Decoding behind a prompt with a cache that evicts, against the full cache: at one batch, and at
/// the largest that fits (Zhang et al. 2023, H2O, section 5.3).
struct EvictBenchOptions {
  BenchModel model;
  ResolvedConfig cache;  ///< with its budget in tokens
  int batch = 24;
  std::uint32_t prompt = 2048, decoded = 2048;  ///< tokens of each sequence
};

struct EvictRun {
  int batch = 0;
  double decode_seconds = 0;  ///< of all steps
  double tokens_per_second = 0;
  std::uint64_t device_bytes = 0;
};

struct EvictBench {
  std::string model, dtype, device;
  EvictRun full, evicting;                  ///< at the batch that was asked for
  EvictRun largest_full, largest_evicting;  ///< at the largest of each
};
EvictBench bench_evict(const EvictBenchOptions& options);

}  // namespace kvlab
