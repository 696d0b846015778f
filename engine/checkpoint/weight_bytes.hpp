// The size of a model's weights, from its config.json alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/checkpoint/model.hpp"

namespace kvlab {

/// Bytes of all weights, with elements of `element_bytes` bytes. The result is a double because the
/// sizes in a config.json may multiply to more than 2^64. It is exact below 2^53.
double weight_bytes(const ModelConfig& config, std::size_t element_bytes);

/// Bytes of weights that a decode step of `batch` sequences reads. Leaves out experts that no
/// sequence uses, and the embedding, of which a step reads one row for each sequence. An embedding
/// that is also the output head counts, because the head reads all of it. Assumes that each
/// sequence uses experts at random, independently of the others.
double step_weight_bytes(const ModelConfig& config, std::size_t element_bytes, std::uint32_t batch);

}  // namespace kvlab
