// A decoder's layers but for the attention: what prompts and steps compute alike.
#pragma once

#include "engine/cuda/capture_shape.hpp"
#include "engine/cuda/model/layer_products.hpp"

namespace kvlab {

/// Hidden states x [row, hidden] are float32 in device memory. Everything is enqueued on the
/// stream.
class DeviceLayers {
 public:
  /// `model` must outlive it; `rows`: most at once.
  DeviceLayers(const DeviceModel& model, int rows, cudaStream_t stream);
  /// Device memory that it needs.
  static std::size_t bytes(const DeviceModel& model, std::size_t rows);

  void embed(const std::int32_t* ids, int rows, float* x);
  /// Queries, keys and values of norm(x), rotated: to the cache as `write` says, which comes from
  /// the cache (the rest of it is filled in here), and to where a capture finds them.
  void qkv(std::uint32_t layer, int rows, const float* x, const LayerOutputs& to,
           kernels::RopeWriteArgs write);
  /// x += of what the attention put out.
  void output(std::uint32_t layer, int rows, float* x, const LayerOutputs& to);
  /// The MLP, in halves.
  void gated(std::uint32_t layer, int rows, const float* x);
  void down(std::uint32_t layer, int rows, float* x);
  /// logits [row, vocab].
  void head(const float* x, int rows, float* logits);

  /// Of one kind of matrix, all layers.
  std::uint64_t weight_bytes(DeviceMatrix DeviceLayer::*matrix) const;
  std::uint64_t head_bytes() const;

 private:
  const DeviceLayer& weights(std::uint32_t layer) const { return model_.weights().layers[layer]; }

  const DeviceModel& model_;
  const ModelConfig& config_;
  cudaStream_t stream_;
  LayerProducts products_;
  cuda::DeviceBuffer inner_;  // [row, mlp]
};

}  // namespace kvlab
