// The weights of a model in one block of device memory.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/checkpoint/model.hpp"
#include "kernels/attention.hpp"
#include "kernels/host/memory.hpp"

namespace kvlab {

kernels::Type kernel_type(Dtype dtype);

/// The weight matrix of a product, and its bias if it has one.
struct DeviceMatrix {
  int n = 0, k = 0;
  void* weight = nullptr;  // [n, k]
  void* bias = nullptr;    // [n], or null
  int experts =
      0;  ///< number of such matrices and biases, stored one after another; 0: a single matrix
};

struct DeviceLayer {
  void *input_norm = nullptr, *mlp_norm = nullptr;      // [hidden], or null
  void *post_attention = nullptr, *post_mlp = nullptr;  // [hidden]: norms, or null
  void *q_norm = nullptr, *k_norm = nullptr;  // [head_size] or [heads * head_size], or null
  void* sinks = nullptr;                      // [query_head], or null
  DeviceMatrix qkv;                           ///< query heads, then key heads, then value heads
  DeviceMatrix output;
  DeviceMatrix router;   ///< only in layers with experts
  DeviceMatrix gate_up;  ///< rows of gate, then rows of up
  DeviceMatrix down;
};

struct DeviceWeights {
  void* embedding = nullptr;  // [vocab, hidden]
  DeviceMatrix head;          ///< the embedding, if the two are tied
  void* norm = nullptr;       // [hidden]
  std::vector<DeviceLayer> layers;
};

/// The part of a model's shape that determines its caches. Needs no device.
class DeviceShape {
 public:
  DeviceShape(ModelConfig config, Dtype dtype) : config_(std::move(config)), dtype_(dtype) {}

  const ModelConfig& config() const { return config_; }
  Dtype dtype() const { return dtype_; }
  kernels::Type type() const { return kernel_type(dtype_); }
  /// Bytes of one token's key, or value, in one head.
  std::size_t key_bytes() const { return config_.head_size * bytes_of(dtype_); }
  /// Bytes of the keys and values of `tokens` tokens over all layers and KV heads. In a layer with
  /// a window, at most as many tokens as the window are counted.
  std::uint64_t cache_bytes(std::uint64_t tokens) const;
  /// The shape of a layer's attention over a cache [sequence, kv_head, slot, dim] with `slots`
  /// slots for each head.
  kernels::AttentionShape attention_shape(int slots, std::uint32_t layer = 0) const;
  /// A layer's sink logits [query_head] in device memory, or null.
  const float* sinks(std::uint32_t layer) const;

 protected:
  ModelConfig config_;
  Dtype dtype_;
  cuda::DeviceBuffer sinks_;
};

/// A model in device memory. Supports head sizes 64, 96, 128 and 256, and at most 16 query heads
/// for a KV head.
class DeviceModel : public DeviceShape {
 public:
  /// Reads a checkpoint to device memory, tensor by tensor, from the mapped files. The dtype is
  /// `dtype` or, if that is not given, the embedding's; tensors of another dtype are rounded to it.
  /// Throws std::runtime_error as Model::load does, if the kernels do not support the shape, and if
  /// there is too little device memory (the message says what would fit).
  static DeviceModel load(const std::filesystem::path& directory, std::optional<Dtype> dtype = {});
  /// Makes random weights on the device, distributed as in an untrained model, for benchmarks at
  /// real shapes.
  static DeviceModel random(ModelConfig config, std::uint64_t seed = 0);

  /// The output projections. They are read back from the device on the first call. Not thread-safe.
  std::shared_ptr<const OutputProjections> output_projections() const;
  const DeviceWeights& weights() const { return weights_; }
  std::uint64_t bytes() const { return block_.bytes(); }
  /// Bytes of weights that a decode step of one sequence reads; see step_weight_bytes().
  std::uint64_t step_bytes() const;

  /// XXH3-64 of the weight files (which are read again) and of tokenizer.json; empty for random
  /// weights.
  std::string weights_xxh3() const;
  std::string tokenizer_xxh3() const;

 private:
  DeviceModel(ModelConfig config, Dtype dtype);
  void read_sinks();

  cuda::DeviceBuffer block_;
  DeviceWeights weights_;
  std::filesystem::path directory_;  ///< empty for random weights
  mutable std::shared_ptr<const OutputProjections> output_;
};

}  // namespace kvlab
