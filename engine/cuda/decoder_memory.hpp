// What a CUDA decoder takes of the device's memory: checked before anything is allocated.
#pragma once

#include <cstddef>

#include "engine/cuda/cache/evicting_cache.hpp"
#include "engine/cuda/cache/full_cache.hpp"
#include "engine/cuda/cuda_decoder.hpp"

namespace kvlab {

// What a decoder with these options is made of.
int most_rows(const CudaDecoderOptions& options);  ///< that go through a layer at once
LayerOutputMemory::Rows output_rows(const CudaDecoderOptions& options);
bool keeps_outputs(const CudaDecoderOptions& options);
FullCache::Options full_options(const CudaDecoderOptions& options);
EvictingOptions evicting_options(const CudaDecoderOptions& options);

/// Whether all of it fits the memory that is free now.
bool fits_free_memory(const DeviceModel& model, const CudaDecoderOptions& options);
/// The options, so that it can be asked before anything is allocated. Throws std::invalid_argument
/// for options that make no sense, std::runtime_error that says what is needed and what would fit.
CudaDecoderOptions checked_options(const DeviceModel& model, const CudaDecoderOptions& options);

}  // namespace kvlab
