// What a replay takes of a checkpoint: its output projections, whole or in 64 random directions, in
// which an error of attention's outputs goes into the residual stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>

#include "policies/columns/output_projections.hpp"
#include "traces/extras.hpp"

namespace kvlab {

inline constexpr std::uint64_t kSketchSeed = 1;  ///< of captures

/// The sketch of a checkpoint's output projections, from its files. Throws what ModelConfig and
/// Checkpoint throw.
OutputSketch output_sketch(const std::filesystem::path& directory, std::uint64_t seed,
                           unsigned threads);

/// One layer of a sketch, [inputs, 64], to be added to zeros: read_row(output, row) puts a row
/// [inputs] of W_o.
void add_layer_sketch(std::uint64_t seed, std::size_t layer, std::size_t hidden,
                      const std::function<void(std::size_t, float*)>& read_row,
                      std::span<float> sketch);

/// The output projections themselves, likewise.
OutputProjections read_output_projections(const std::filesystem::path& directory);

}  // namespace kvlab
