// The products of a layer: own kernels for a few rows, cuBLASLt for more.
#pragma once

#include "engine/cuda/model/device_model.hpp"
#include "engine/cuda/model/matmul.hpp"
#include "kernels/linear/linear.hpp"

namespace kvlab {

class LayerProducts {
 public:
  /// `model` must outlive it; `rows`: most at once.
  LayerProducts(const DeviceModel& model, int rows, cudaStream_t stream);

  /// Device memory that it needs.
  static std::size_t bytes(const DeviceModel& model, std::size_t rows);

  // x [rows, hidden] is the float32 residual stream; the others are of the model's type.

  /// qkv [write.tokens, n] = matrix * norm(x) + bias; from there to where `write` says.
  void qkv(const DeviceLayer& layer, const float* x, void* qkv, kernels::RopeWriteArgs write);
  /// x += matrix * input + bias; input [rows, k].
  void added(const DeviceMatrix& matrix, const void* input, int rows, float* x);
  /// inner [rows, mlp] = silu(gate * norm(x)) * (up * norm(x)).
  void gated(const DeviceLayer& layer, int rows, const float* x, void* inner);
  /// logits [rows, vocab] float32 of the final norm of x.
  void head(const float* x, int rows, float* logits);

 private:
  /// Arguments of products of few rows.
  kernels::LinearArgs added_args(const DeviceMatrix& matrix, const void* input, int rows,
                                 float* x) const;
  kernels::LinearArgs normed_args(const DeviceMatrix& matrix, const void* gamma, const float* x,
                                  int rows) const;
  kernels::LinearArgs head_args(const float* x, int rows, float* logits) const;
  kernels::GatedLinearArgs gated_args(const DeviceLayer& layer, int rows, const float* x,
                                      void* inner) const;
  void norm(const void* gamma, const float* x, int rows);
  void matmul(const DeviceMatrix& matrix, const void* input, int rows,
              cuda::MatmulArgs::Output output, void* y);

  const DeviceModel& model_;
  const ModelConfig& config_;
  cudaStream_t stream_;
  cuda::DeviceBuffer normed_;   // [rows, hidden]
  cuda::DeviceBuffer gate_up_;  // [rows, 2 * mlp]
  cuda::Matmul matmul_;
};

}  // namespace kvlab
