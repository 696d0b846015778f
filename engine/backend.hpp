// A model on the device that was requested, and decoders of it.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "engine/batch_decoder.hpp"
#include "engine/decoder.hpp"
#include "engine/sequence_decoder.hpp"
#include "traces/trace.hpp"

namespace kvlab {

class DeviceModel;  // engine/cuda/model/device_model.hpp

enum class Device { cpu, cuda };

class Backend {
 public:
  virtual ~Backend() = default;
  virtual const ModelConfig& config() const = 0;
  virtual std::string weights_xxh3() const = 0;
  /// As the device holds them, in float32.
  virtual std::shared_ptr<const OutputProjections> output_projections() const = 0;
  /// What queries, keys and values are rounded to; none: they are float32 throughout.
  virtual std::optional<Dtype> rounding() const = 0;
  /// A decoder for a sequence of at most `tokens`. Throws std::invalid_argument for a cache that
  /// this device does not have, std::runtime_error if its memory is too small.
  virtual std::unique_ptr<SequenceDecoder> decoder(const ResolvedConfig& cache,
                                                   std::uint32_t tokens) = 0;
  /// A decoder that tells `observer` all that it does, which must outlive it; slow.
  virtual std::unique_ptr<SequenceDecoder> watched_decoder(const ResolvedConfig& cache,
                                                           std::uint32_t tokens,
                                                           DecoderObserver& observer) = 0;

  /// The same model, sequences side by side.
  virtual BatchBackend& batches() = 0;
  /// Its weights in device memory; null on the CPU.
  virtual const DeviceModel* device_model() const { return nullptr; }

  /// The header of a trace of this model; `options`: how it is run, for the record.
  virtual TraceHeader trace_header(nlohmann::json options) const = 0;
  /// A decoder with the full cache; all that it computes goes into the trace, whose writer must
  /// outlive it, and is there after flush(). `progress` gets the tokens written, from any
  /// thread.
  virtual std::unique_ptr<SequenceDecoder> capturing_decoder(
      const ResolvedConfig& cache, std::uint32_t tokens, TraceWriter& writer,
      std::function<void(std::uint32_t)> progress) = 0;
};

/// Throws std::runtime_error for a broken checkpoint or too little memory.
std::unique_ptr<Backend> load_backend(Device device, const std::filesystem::path& directory,
                                      unsigned threads);

/// Whether this build has the CUDA backend, and this machine a device for it.
bool cuda_in_build();
bool has_cuda_device();
/// Lines about this build's CUDA code, the driver and each GPU; needs none of them.
std::string cuda_description();
/// load_backend(Device::cuda, …); throws std::invalid_argument in a build without it,
/// std::runtime_error without a device.
std::unique_ptr<Backend> load_cuda_backend(const std::filesystem::path& directory);

// The backend on the CPU, of a model that is loaded already.

/// Shares the model's weights.
std::unique_ptr<Backend> cpu_backend(const Model& model, unsigned threads);

}  // namespace kvlab
