// A decoder's layers except attention, for prompts and steps. Products of few rows use kvlab's
// kernels; larger products use cuBLASLt.
#pragma once

#include "engine/cuda/capture_shape.hpp"
#include "engine/cuda/model/device_model.hpp"
#include "kernels/host/product.hpp"
#include "kernels/linear/experts.hpp"
#include "kernels/linear/linear.hpp"
#include "kernels/pointwise.hpp"

namespace kvlab {

/// Hidden states x [row, hidden], the residual stream, are float32 in device memory. Everything
/// else has the model's dtype. All calls enqueue on the stream.
class DeviceLayers {
 public:
  /// `model` must outlive this object. `rows`: maximum number of rows of a call.
  DeviceLayers(const DeviceModel& model, int rows, cudaStream_t stream);
  /// Bytes of device memory that an object needs.
  static std::size_t bytes(const DeviceModel& model, int rows) {
    return cuda::Placed<Work>::bytes(model, rows);
  }

  void embed(const std::int32_t* ids, int rows, float* x);
  /// Computes queries, keys and values of norm(x), rotates queries and keys, and writes all three
  /// to where `write` says. The cache makes `write`; this function sets its other arguments. `to`:
  /// where to store what a capture needs.
  void qkv(std::uint32_t layer, int rows, const float* x, const LayerOutputs& to,
           kernels::RopeWriteArgs write);
  /// x += output projection of the attention outputs. If the model has a norm after attention, the
  /// projection is normalized before it is added. If a capture needs them, also writes the squared
  /// norms of x.
  void output(std::uint32_t layer, int rows, float* x, const LayerOutputs& to);
  /// The two halves of the MLP: inner = act(gate * norm(x)) * (up * norm(x)), then x += down *
  /// inner. If the model has a norm after the MLP, down * inner is normalized before it is added.
  void gate_up(std::uint32_t layer, int rows, const float* x);
  void down(std::uint32_t layer, int rows, float* x);
  /// Logits [row, vocab] in float32 of x, after the final norm.
  void head(const float* x, int rows, float* logits);

  /// Bytes of one kind of matrix over all layers. Counts only the experts that one row reads.
  std::uint64_t weight_bytes(DeviceMatrix DeviceLayer::*matrix) const;
  std::uint64_t head_bytes() const;

 private:
  struct Work {
    Work(cuda::Arena& arena, const DeviceModel& model, int rows);
    std::byte* normed;       // [row, hidden]
    std::byte* gate_up;      // [row, 2 * mlp]
    std::byte* inner;        // [row, mlp]
    float* post_norm_input;  // [row, hidden]: input of a norm after a block; null if there is none
    float* expert_outputs;   // [row, chosen, hidden]; with experts, gate_up and inner also have a
                             // row for each chosen expert
    float* logits;           // [row, expert]: logits of the router
    kernels::Routes routes{};
  };

  /// Whether there are so few rows that reading the weights takes most of the time, so that tensor
  /// cores would not help.
  bool is_few(int rows) const;
  const DeviceLayer& weights(std::uint32_t layer) const { return model_.weights().layers[layer]; }
  /// gate_up() and down() for layers with experts.
  void gated_experts(const DeviceLayer& w, int rows, const float* x);
  void down_experts(const DeviceLayer& w, int rows, float* x);
  kernels::ExpertProductArgs expert_product(const DeviceMatrix& matrix, int rows) const;
  void norm_all_heads(const DeviceLayer& w, int rows, std::byte* qkv);
  /// x += matrix * input + bias, or x += the norm of matrix * input + bias. input [row, k].
  void add(const DeviceMatrix& matrix, const void* post_norm, const void* input, int rows,
           float* x);
  /// Arguments for products of few rows.
  kernels::LinearArgs few(const DeviceMatrix& matrix, const void* x, int rows) const;
  kernels::LinearArgs few_normed(const DeviceMatrix& matrix, const void* gamma, const float* x,
                                 int rows);
  /// The norm of x, in memory that the next call reuses. If there is no norm, returns x rounded to
  /// the model's dtype.
  const std::byte* normalize(const void* gamma, const float* x, int rows);
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
  int few_;  ///< maximum number of rows for kernels/linear on this device; cuBLASLt handles more
  cuda::Placed<Work> work_;
  cuda::Products products_;
};

}  // namespace kvlab
