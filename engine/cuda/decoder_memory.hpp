// What a CUDA decoder takes of the device's memory: checked before anything is allocated.
#pragma once

#include <cstddef>

#include "engine/cuda/cuda_decoder.hpp"
#include "engine/cuda/cache/evicting_cache.hpp"

namespace kvlab {

/// Most tokens that go through a layer at once.
int most_rows(const CudaDecoderOptions& options);
LayerOutputMemory::Rows output_rows(const CudaDecoderOptions& options);
bool keeps_outputs(const CudaDecoderOptions& options);
EvictingCache::Options evicting_options(const CudaDecoderOptions& options);

/// Bytes of the work buffers that belong to the decoder itself.
struct WorkSizes {
  std::size_t x, logits;
};
WorkSizes work_sizes(const ModelConfig& config, const CudaDecoderOptions& options);

/// Whether all of it fits the memory that is free now.
bool fits_free_memory(const DeviceModel& model, const CudaDecoderOptions& options);
/// The options, so that it can be asked before anything is allocated. Throws std::invalid_argument
/// for options that make no sense, std::runtime_error that says what is needed and what would fit.
CudaDecoderOptions checked_options(const DeviceModel& model, const CudaDecoderOptions& options);

}  // namespace kvlab
