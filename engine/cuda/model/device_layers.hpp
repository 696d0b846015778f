// A decoder's layers but for the attention: what prompts and steps compute alike. Own kernels for
// products of a few rows, cuBLASLt for more.
#pragma once

#include "engine/cuda/capture_shape.hpp"
#include "engine/cuda/model/device_model.hpp"
#include "kernels/host/product.hpp"
#include "kernels/linear/experts.hpp"
#include "kernels/linear/linear.hpp"
#include "kernels/pointwise.hpp"

namespace kvlab {

/// Hidden states x [row, hidden], the residual stream, are float32 in device memory; all between is
/// of the model's type. Everything is enqueued on the stream.
class DeviceLayers {
 public:
  /// `model` must outlive it; `rows`: most at once.
  DeviceLayers(const DeviceModel& model, int rows, cudaStream_t stream);
  /// Device memory that it needs.
  static std::size_t bytes(const DeviceModel& model, int rows) {
    return cuda::Placed<Work>::bytes(model, rows);
  }

  void embed(const std::int32_t* ids, int rows, float* x);
  /// Queries, keys and values of norm(x), rotated: to the cache as `write` says, which comes from
  /// the cache (the rest of it is filled in here), and to where a capture finds them.
  void qkv(std::uint32_t layer, int rows, const float* x, const LayerOutputs& to,
           kernels::RopeWriteArgs write);
  /// x += of what the attention put out; and the squared norms of that x, where a capture wants
  /// them.
  void output(std::uint32_t layer, int rows, float* x, const LayerOutputs& to);
  /// The MLP, in halves: inner = act(gate * norm(x)) * (up * norm(x)); x += down * inner, which is
  /// normed where there is a norm behind, as that of output() is.
  void gated(std::uint32_t layer, int rows, const float* x);
  void down(std::uint32_t layer, int rows, float* x);
  /// logits [row, vocab] float32 of the final norm of x.
  void head(const float* x, int rows, float* logits);

  /// Of one kind of matrix, all layers; of experts, those that one row reads.
  std::uint64_t weight_bytes(DeviceMatrix DeviceLayer::*matrix) const;
  std::uint64_t head_bytes() const;

 private:
  struct Work {
    Work(cuda::Arena& arena, const DeviceModel& model, int rows);
    std::byte* normed;   // [row, hidden]
    std::byte* gate_up;  // [row, 2 * mlp]
    std::byte* inner;    // [row, mlp]
    float* behind;       // [row, hidden]: what a norm behind a block takes; null without them
    float* of_experts;   // [row, chosen, hidden]; its kin have rows for each chosen expert, too
    float* logits;       // [row, expert], of the router
    kernels::Routes routes{};
  };

  /// One weight read serves so few rows that the matrix units have nothing to do.
  bool is_few(int rows) const;
  const DeviceLayer& weights(std::uint32_t layer) const { return model_.weights().layers[layer]; }
  /// gated() and down() of layers of experts.
  void gated_experts(const DeviceLayer& w, int rows, const float* x);
  void down_experts(const DeviceLayer& w, int rows, float* x);
  kernels::ExpertProductArgs expert_product(const DeviceMatrix& matrix, int rows) const;
  void norm_all_heads(const DeviceLayer& w, int rows, std::byte* qkv);
  /// x += matrix * input + bias, or the norm of that; input [row, k].
  void add(const DeviceMatrix& matrix, const void* norm_behind, const void* input, int rows,
           float* x);
  /// Arguments of products of few rows.
  kernels::LinearArgs few(const DeviceMatrix& matrix, const void* x, int rows) const;
  kernels::LinearArgs few_normed(const DeviceMatrix& matrix, const void* gamma, const float* x,
                                 int rows);
  /// Norms of x, in memory that the next ones take; x itself, rounded, where there is no norm.
  const std::byte* normed(const void* gamma, const float* x, int rows);
  kernels::Norm norm_of(const void* gamma) const {
    return {gamma, config_.norm_epsilon, config_.norm_offset};
  }
  kernels::Activation activation() const {
    return config_.gelu ? kernels::Activation::gelu_tanh : kernels::Activation::silu;
  }
  void matmul(const DeviceMatrix& matrix, const void* input, int rows,
              cuda::ProductArgs::Output output, void* y);

  const DeviceModel& model_;
  const ModelConfig& config_;
  cudaStream_t stream_;
  int few_;  ///< rows that the kernels of kernels/linear take here; more are cuBLASLt's
  cuda::Placed<Work> work_;
  cuda::Products products_;
};

}  // namespace kvlab
