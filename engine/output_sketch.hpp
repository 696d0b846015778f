// What an error of attention's outputs does to the residual stream, in 64 random directions.
#pragma once

#include <filesystem>

#include "traces/extras.hpp"

namespace kvlab {

inline constexpr std::uint64_t kSketchSeed = 1;  ///< of captures

/// The sketch of a checkpoint's output projections, from its files. Throws what ModelConfig and
/// Checkpoint throw.
OutputSketch output_sketch(const std::filesystem::path& directory, std::uint64_t seed,
                           unsigned threads);

}  // namespace kvlab
