// The weights of a model in device memory, in one block.
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

/// A product's weight, and bias where there is one.
struct DeviceMatrix {
  int n = 0, k = 0;
  void* weight = nullptr;  // [n, k]
  void* bias = nullptr;    // [n], or null
  int experts = 0;         ///< such matrices one behind the other, and biases; 0: one
};

struct DeviceLayer {
  void *input_norm = nullptr, *mlp_norm = nullptr;          // [hidden], or null
  void *behind_attention = nullptr, *behind_mlp = nullptr;  // [hidden]: norms, or null
  void *q_norm = nullptr, *k_norm = nullptr;                // [head_size], of all heads, or null
  void* sinks = nullptr;                                    // [query_head], or null
  DeviceMatrix qkv;  ///< query heads, then key heads, then value heads
  DeviceMatrix output;
  DeviceMatrix router;   ///< a layer of experts has one
  DeviceMatrix gate_up;  ///< the gate's rows, then those of up
  DeviceMatrix down;
};

struct DeviceWeights {
  void* embedding = nullptr;  // [vocab, hidden]
  DeviceMatrix head;          ///< the embedding itself where it is tied
  void* norm = nullptr;       // [hidden]
  std::vector<DeviceLayer> layers;
};

/// What a model's caches are laid out by: needs no device.
class DeviceShape {
 public:
  DeviceShape(ModelConfig config, Dtype dtype) : config_(std::move(config)), dtype_(dtype) {}

  const ModelConfig& config() const { return config_; }
  Dtype dtype() const { return dtype_; }
  kernels::Type type() const { return kernel_type(dtype_); }
  /// Bytes of one token's key in one head, or of its value.
  std::size_t key_bytes() const { return config_.head_size * bytes_of(dtype_); }
  /// Bytes of keys and values of so many tokens, all layers and KV heads; windows hold no more.
  std::uint64_t cache_bytes(std::uint64_t tokens) const;
  /// A layer's attention over a cache [sequence, kv_head, slot, dim] of `slots` for each head.
  kernels::AttentionShape attention_shape(int slots, std::uint32_t layer = 0) const;
  /// [query_head], in device memory: a layer's sink logits, or null.
  const float* sinks(std::uint32_t layer) const;

 protected:
  ModelConfig config_;
  Dtype dtype_;
  cuda::DeviceBuffer sinks_;
};

/// Head sizes 64, 96, 128, 256, at most 16 query heads for a KV head.
class DeviceModel : public DeviceShape {
 public:
  /// Reads a checkpoint into device memory, tensor by tensor from the mapped files. The dtype is
  /// the embedding's, or the one that is given; tensors of another dtype are rounded to it. Throws
  /// std::runtime_error: what Model::load throws, a shape that the kernels do not take, too little
  /// device memory (with what would fit).
  static DeviceModel load(const std::filesystem::path& directory, std::optional<Dtype> dtype = {});
  /// Weights sampled on the device, as a model is initialised: for benchmarks at real shapes.
  static DeviceModel random(ModelConfig config, std::uint64_t seed = 0);

  /// Weights of the output projections, read back at the first call. From one thread.
  std::shared_ptr<const OutputProjections> output_projections() const;
  const DeviceWeights& weights() const { return weights_; }
  std::uint64_t bytes() const { return block_.bytes(); }
  /// Bytes that one decode step of one sequence reads: all but the embedding, of which it reads a
  /// row, unless it is the head too, and but the experts that are not chosen.
  std::uint64_t step_bytes() const;

  /// XXH3-64 of the weight files (read anew) and of tokenizer.json; empty for random weights.
  std::string weights_xxh3() const;
  std::string tokenizer_xxh3() const;

 private:
  DeviceModel(ModelConfig config, Dtype dtype);
  void read_sinks();

  cuda::DeviceBuffer block_;
  DeviceWeights weights_;
  std::filesystem::path directory_;  ///< empty: random
  mutable std::shared_ptr<const OutputProjections> output_;
};

}  // namespace kvlab
