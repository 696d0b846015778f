// The caches of layers with a sliding window. Each KV head has a ring with as many slots as the
// window has tokens. Token t is in slot t modulo that number. Policies do not act on these layers.
#pragma once

#include "engine/cuda/cache/device_cache.hpp"
#include "engine/cuda/decoder_options.hpp"
#include "engine/cuda/model/device_model.hpp"
#include "policies/rule/live_tokens.hpp"

namespace kvlab {

class WindowRings {
 public:
  /// `batch` must outlive this object.
  WindowRings(const DeviceModel& model, const BatchState& batch, const CudaDecoderOptions& options,
              cudaStream_t stream);
  /// The bytes of device memory that it allocates.
  static CacheBytes bytes(const DeviceModel& model, const CudaDecoderOptions& options);

  bool has(std::uint32_t layer) const { return config_.rows[layer].window > 0; }
  /// kept(): number of the `fed` tokens that a layer keeps. live_bytes(): bytes of the keys and
  /// values that a sequence of `fed` tokens has in all layers with a ring.
  std::uint32_t kept(std::uint32_t layer, std::uint32_t fed) const {
    return std::min(fed, config_.rows[layer].window);
  }
  std::uint64_t live_bytes(std::uint32_t fed) const;

  /// Where a step's keys and values are written. The caller sets RoPE and queries. Idle rows, whose
  /// position is below 0, write nothing.
  kernels::RopeWriteArgs write(std::uint32_t layer) const;
  void attend(std::uint32_t layer, int rows, const std::byte* q, const LayerOutputs& to) const;

  /// Like the functions above, for `rows` tokens of a prompt, from position `position` on.
  kernels::RopeWriteArgs write(std::uint32_t layer, int sequence, std::uint32_t position) const;
  void attend(std::uint32_t layer, int sequence, std::uint32_t position, int rows,
              const std::byte* q, const LayerOutputs& to) const;

  /// For benchmarks: fills the rings with random keys and values.
  void pretend() const;

 private:
  struct Storage {
    Storage(cuda::Arena& arena, const DeviceModel& model, const CudaDecoderOptions& options);
    std::byte *keys, *values;  // [layer, sequence, kv_head, slot, dim], rotated
  };
  struct Work {
    Work(cuda::Arena& arena, const DeviceModel& model, const CudaDecoderOptions& options);
    std::byte *keys, *values;    // [kv_head, slot, dim]: older tokens, then the prompt's
    std::int32_t *iota, *zeros;  // [slot], [row]
    std::byte* workspace;
  };
  kernels::AttentionShape shape(std::uint32_t layer, int slots) const;
  /// Offset in bytes, from the first ring, of the rings that a sequence has in a layer.
  std::size_t offset(std::uint32_t layer, int sequence) const;
  /// Number of tokens before a position that its query sees.
  std::uint32_t older(std::uint32_t layer, std::uint32_t position) const {
    return live_before_append(position, config_.rows[layer].window);
  }
  enum class To { ring, prompt };
  void copy(std::uint32_t layer, int sequence, std::uint32_t first, std::uint32_t count,
            std::uint32_t prompt_slot, To to) const;

  const DeviceModel& model_;
  const ModelConfig& config_;
  const BatchState& batch_;
  int sequences_, prompt_slots_;
  cudaStream_t stream_;
  std::vector<std::size_t>
      first_;  // [layer]: number of slots, of all sequences, in the layers before this one
  std::vector<int> slots_;  // [layer]: number of slots of a ring; 0: the layer has no ring
  cuda::Placed<Storage> storage_;
  cuda::Placed<Work> work_;
};

}  // namespace kvlab
