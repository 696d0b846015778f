// Synthetic traces on disk whose attention has sinks and heavy hitters.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "sim/replay.hpp"
#include "tests/traces/temporary_folder.hpp"

namespace kvlab {

struct RandomTrace {
  std::uint32_t layers = 2, query_heads = 4, kv_heads = 2, head_size = 16;
  Dtype dtype = Dtype::f32;
  Rounding rounding = Rounding::none;
  float rope_factor = 1;
  std::vector<Segment> segments{{0, 40, SegmentKind::prompt}, {40, 80, SegmentKind::decode}};
  double spread = 1.5;        ///< standard deviation of the logits of ordinary tokens
  double pull = 4;            ///< roughly added to heavy tokens' logits; 0: no heavy tokens
  bool silent_first = false;  ///< the first value is zero, and so is the first output
  bool residuals = true;      ///< includes the data for residual_error
  std::uint32_t gradient_samples = 3;  ///< number of gradient samples
  Queries gradients_of = Queries::decode;
  std::vector<Passage> passages;
  std::vector<RowSpec> rows;  ///< by layer; empty: all layers are equal
  std::vector<std::uint32_t> numbers;
  std::uint64_t seed = 1;
};

/// Adds random gradients to a finished trace.
void add_random_gradients(const std::filesystem::path& directory, std::uint32_t gradient_samples,
                          std::uint64_t seed, Queries queries = Queries::decode);

/// Writes the trace to `directory`, which must not exist, and opens it. Its check rows are computed
/// in float64.
TraceReader write_random_trace(const std::filesystem::path& directory, const RandomTrace& wanted);

/// A trace that exists as long as this object.
struct Traced {
  explicit Traced(const RandomTrace& wanted)
      : trace(write_random_trace(folder / "trace", wanted)) {}
  test::TemporaryFolder folder;
  TraceReader trace;
};

/// Traces with 1, 3, 7 and 4 query heads per KV head (a head group has 4). Their lengths are close
/// to that of a block of queries. They have two turns, and together they cover every rounding.
std::vector<RandomTrace> group_shapes();

using Sets = std::vector<std::vector<std::uint32_t>>;  ///< [query] positions
/// The positions that one KV head keeps at every query.
Sets every_set(const TraceReader& trace, std::uint32_t sequence, const CacheConfig& config,
               const ReplayOptions& options, std::uint32_t layer, std::uint32_t kv_head);
/// Fails at the first query with different sets.
void check_sets(const Sets& kept, const Sets& wanted);

}  // namespace kvlab
