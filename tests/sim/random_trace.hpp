// Synthetic traces on disk, with attention that has sinks and heavy hitters.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "traces/trace.hpp"

namespace kvlab {

struct RandomTrace {
  std::uint32_t layers = 2, query_heads = 4, kv_heads = 2, head_size = 16;
  Dtype dtype = Dtype::f32;
  Rounding rounding = Rounding::none;
  float rope_factor = 1;
  std::vector<Segment> segments{{0, 40, SegmentKind::prompt}, {40, 80, SegmentKind::decode}};
  double spread = 1.5;        ///< standard deviation of the logits of ordinary tokens
  double pull = 4;            ///< logits of heavy tokens lie higher by this, roughly; 0: none
  bool silent_first = false;  ///< the first value is zero, and so is the first output
  bool residuals = true;      ///< with what residual_error needs
  std::uint32_t draws = 3;    ///< of gradients
  Span gradients_of = Span::decode;
  std::vector<NamedSpan> spans;
  std::vector<RowSpec> rows;  ///< by layer; empty: alike
  std::vector<std::uint32_t> numbers;
  std::uint64_t seed = 1;
};

/// Adds random gradients to a finished trace.
void add_random_gradients(const std::filesystem::path& directory, std::uint32_t draws,
                          std::uint64_t seed, Span span = Span::decode);

/// Writes the trace to `directory`, which must not exist, and opens it. Its check rows are computed
/// in float64.
TraceReader write_random_trace(const std::filesystem::path& directory, const RandomTrace& wanted);

}  // namespace kvlab
