// A model loaded on a device, and its decoders.
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

class DeviceModel;      // engine/cuda/model/device_model.hpp
class DraftingDecoder;  // engine/draft/drafting_decoder.hpp
struct DraftOptions;

enum class Device { cpu, cuda };

class Backend {
 public:
  virtual ~Backend() = default;
  virtual const ModelConfig& config() const = 0;
  virtual std::string weights_xxh3() const = 0;
  /// The output projections as the device stores them, converted to float32.
  virtual std::shared_ptr<const OutputProjections> output_projections() const = 0;
  /// The dtype to which queries, keys and values are rounded. nullopt if they are float32
  /// throughout.
  virtual std::optional<Dtype> rounding() const = 0;
  /// Makes a decoder for a sequence of at most `tokens` tokens. Throws std::invalid_argument if
  /// this device does not support the cache, and std::runtime_error if the device has too little
  /// memory.
  virtual std::unique_ptr<SequenceDecoder> decoder(const ResolvedConfig& cache,
                                                   std::uint32_t tokens) = 0;
  /// Makes a decoder that drafts tokens with the cache `drafter` and verifies them with the full
  /// cache. Throws std::invalid_argument if this device cannot draft or does not support the cache.
  /// The default implementation always throws.
  virtual std::unique_ptr<DraftingDecoder> drafting_decoder(const ResolvedConfig& drafter,
                                                            DraftOptions options);
  /// Makes a slow decoder that reports everything it does to `observer`, which must outlive the
  /// decoder.
  virtual std::unique_ptr<SequenceDecoder> watched_decoder(const ResolvedConfig& cache,
                                                           std::uint32_t tokens,
                                                           DecoderObserver& observer) = 0;

  /// Decodes batches of sequences with the same model.
  virtual BatchBackend& batches() = 0;
  /// The weights in device memory; null on the CPU.
  virtual const DeviceModel* device_model() const { return nullptr; }

  /// Makes the header of a trace of this model. `options` records how the model is run.
  virtual TraceHeader trace_header(nlohmann::json options) const = 0;
  /// Makes a decoder with the full cache that writes a trace. `writer` must outlive the decoder,
  /// and has received all data when the decoder's flush() returns. `progress` is called with the
  /// number of tokens written so far, possibly from another thread.
  virtual std::unique_ptr<SequenceDecoder> capturing_decoder(
      const ResolvedConfig& cache, std::uint32_t tokens, TraceWriter& writer,
      std::function<void(std::uint32_t)> progress) = 0;
};

/// Loads a checkpoint. Throws std::runtime_error if it is broken or does not fit into memory.
std::unique_ptr<Backend> load_backend(Device device, const std::filesystem::path& directory,
                                      unsigned threads);

/// Whether this build contains the CUDA backend, and whether this machine has a device for it.
bool cuda_in_build();
bool has_cuda_device();
/// Describes this build's CUDA code, the driver and each GPU, and says which of these are missing.
std::string cuda_description();
/// Same as load_backend(Device::cuda, …). Throws std::invalid_argument in a build without CUDA, and
/// std::runtime_error if there is no device.
std::unique_ptr<Backend> load_cuda_backend(const std::filesystem::path& directory);

// The CPU backend of a model that is already loaded.

/// Makes a CPU backend that shares the weights of `model`.
std::unique_ptr<Backend> cpu_backend(const Model& model, unsigned threads);

}  // namespace kvlab
