// A trace of tensors that are in memory: for models that no capture of ours reads.
#pragma once

#include <array>
#include <cstddef>
#include <filesystem>
#include <span>

#include "traces/trace.hpp"

namespace kvlab {

/// [layer, head, token, dim], strides in elements; of any floating dtype.
struct StridedTensor {
  const std::byte* data = nullptr;
  Dtype dtype = Dtype::f32;
  std::array<std::int64_t, 4> strides{};

  /// Token `token` of one head, widened: to [size].
  void read(std::uint32_t layer, std::uint32_t head, std::uint32_t token, std::uint32_t size,
            float* to) const;
};

/// Queries, keys and values before RoPE, of header.shape; all of its dtype.
struct SequenceTensors {
  StridedTensor q, k, v;
  std::span<const std::int32_t> ids;
  std::uint32_t prompt_tokens = 0;  ///< the rest is decoded
};

/// Writes the trace. The rows that a verifier looks at are computed here. Throws as TraceWriter
/// does, and std::invalid_argument for a number that is not finite.
void write_array_trace(const std::filesystem::path& directory, const TraceHeader& header,
                       const SequenceTensors& tensors);

}  // namespace kvlab
