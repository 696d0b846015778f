// The names of a trace's tensors, and the rows of a shard that are kept for checking.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "traces/trace.hpp"

namespace kvlab {

inline constexpr std::string_view kCheckRowsTensor = "check_rows";

/// Returns the name of a layer's tensor, such as layers.3.q.
std::string layer_tensor(std::uint32_t layer, std::string_view part);

/// Sixteen rows spread evenly over a whole shard, including the first and the last.
inline constexpr std::array<std::uint32_t, kCheckRows> kCheckGrid = [] {
  std::array<std::uint32_t, kCheckRows> rows{};
  for (std::uint32_t i = 0; i < kCheckRows; ++i)
    rows[i] = (i * (kShardTokens - 1) + (kCheckRows - 1) / 2) / (kCheckRows - 1);
  return rows;
}();

/// Replaces DIRECTORY/tokens.safetensors. Returns its XXH3-64.
std::string write_tokens(const std::filesystem::path& directory, std::span<const std::int32_t> ids,
                         const TraceHeader& header);
/// Returns the ids, and stores the other data of the file in `header`. Throws std::runtime_error
/// for missing, unknown or misshapen tensors.
std::vector<std::int32_t> read_tokens(const SafetensorsFile& file, TraceHeader& header);

inline constexpr std::string_view kResidualTensor = "residual_norm2", kGradientTensor = "grad",
                                  kGradientScaleTensor = "grad_scale";

/// Throws std::runtime_error unless the tensors of a shard are those of a trace of this shape.
void check_shard_tensors(const SafetensorsFile& file, const ModelShape& shape,
                         const ShardInfo& shard, bool has_residuals);
/// Returns the scale by which the gradients of a file are multiplied. Throws std::runtime_error
/// unless its tensors are those of a trace of this shape.
float check_gradient_tensors(const SafetensorsFile& file, const ModelShape& shape,
                             const ShardInfo& shard, std::uint32_t gradient_samples);

}  // namespace kvlab
