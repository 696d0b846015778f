// A random trace for measuring: attention with sinks, heavy tokens and a leaning to the recent, as
// trained models have it. Not for conclusions about policies.
#pragma once

#include <filesystem>

#include "traces/trace.hpp"

namespace kvlab {

struct SyntheticShape {
  std::uint32_t layers = 4, query_heads = 32, kv_heads = 8, head_size = 128;
  std::uint32_t tokens = 4096, prompt_tokens = 512;
  std::uint32_t draws = 0;  ///< of gradients; with any, all that the metrics beyond attention need
};

/// Writes a bf16 trace to `directory`, which must not exist, with every column that a registered
/// policy reads and nobody computes. Its check rows are not computed: it does not verify.
TraceReader write_synthetic_trace(const std::filesystem::path& directory,
                                  const SyntheticShape& shape, std::uint64_t seed);

}  // namespace kvlab
