// The size of a model's weights, from its config.json alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/checkpoint/model.hpp"

namespace kvlab {

/// Bytes of all weights, with elements of `element_bytes` bytes. As a double, because the product
/// of the sizes that a config may have is above 2^64; it is exact below 2^53.
double weight_bytes(const ModelConfig& config, std::size_t element_bytes);

/// Bytes of weights that a decode step of `batch` sequences reads. These are all weights except the
/// embedding (of which one row is read for each sequence) unless it is also the head, and except
/// experts that no sequence uses. For that, each sequence is assumed to use experts at random,
/// independently of the others.
double step_weight_bytes(const ModelConfig& config, std::size_t element_bytes, std::uint32_t batch);

}  // namespace kvlab
