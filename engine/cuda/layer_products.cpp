#include "engine/cuda/layer_products.hpp"

#include "kernels/linear.hpp"
#include "kernels/pointwise.hpp"

namespace kvlab {
namespace {

using cuda::check;
using Output = cuda::MatmulArgs::Output;

/// One weight read serves so few rows that the matrix units have nothing to do.
bool is_few(int rows) { return rows <= kernels::kMostLinearRows; }

std::size_t normed_bytes(const DeviceModel& model, std::size_t rows) {
  return rows * model.config().hidden * bytes_of(model.dtype());
}

std::size_t gate_up_bytes(const DeviceModel& model, std::size_t rows) {
  return rows * 2 * model.config().mlp * bytes_of(model.dtype());
}

}  // namespace

LayerProducts::LayerProducts(const DeviceModel& model, int rows, cudaStream_t stream)
    : model_(model),
      config_(model.config()),
      stream_(stream),
      normed_(normed_bytes(model, static_cast<std::size_t>(rows)), "normed hidden states"),
      gate_up_(gate_up_bytes(model, static_cast<std::size_t>(rows)), "the MLP") {}

std::size_t LayerProducts::bytes(const DeviceModel& model, std::size_t rows) {
  return normed_bytes(model, rows) + gate_up_bytes(model, rows);
}

void LayerProducts::norm(const void* gamma, const float* x, int rows) {
  check(kernels::rms_norm(model_.type(), x, gamma, config_.norm_epsilon, rows,
                          static_cast<int>(config_.hidden), normed_.data(), stream_),
        "a norm");
}

void LayerProducts::matmul(const DeviceMatrix& matrix, const void* input, int rows, Output output,
                           void* y) {
  matmul_({.type = model_.type(),
           .rows = rows,
           .n = matrix.n,
           .k = matrix.k,
           .weight = matrix.weight,
           .bias = matrix.bias,
           .x = input,
           .output = output,
           .y = y},
          stream_);
}

void LayerProducts::normed(const DeviceMatrix& matrix, const void* gamma, const float* x, int rows,
                           void* y) {
  if (!is_few(rows)) {
    norm(gamma, x, rows);
    matmul(matrix, normed_.data(), rows, Output::type, y);
    return;
  }
  check(kernels::linear({.type = model_.type(),
                         .rows = rows,
                         .n = matrix.n,
                         .k = matrix.k,
                         .weight = matrix.weight,
                         .x = x,
                         .gamma = gamma,
                         .norm_epsilon = config_.norm_epsilon,
                         .bias = matrix.bias,
                         .y = y,
                         .y_float = nullptr,
                         .residual = nullptr},
                        stream_),
        "a product");
}

void LayerProducts::added(const DeviceMatrix& matrix, const void* input, int rows, float* x) {
  if (is_few(rows)) {
    check(kernels::linear({.type = model_.type(),
                           .rows = rows,
                           .n = matrix.n,
                           .k = matrix.k,
                           .weight = matrix.weight,
                           .x = input,
                           .gamma = nullptr,
                           .norm_epsilon = 0,
                           .bias = matrix.bias,
                           .y = nullptr,
                           .y_float = nullptr,
                           .residual = x},
                          stream_),
          "a product");
  } else if (!matrix.bias) {
    matmul(matrix, input, rows, Output::add_float32, x);
  } else {
    matmul(matrix, input, rows, Output::type, normed_.data());
    check(kernels::add_residual(model_.type(), normed_.data(),
                                static_cast<std::size_t>(rows) * config_.hidden, x, stream_),
          "a sum");
  }
}

void LayerProducts::gated(const DeviceLayer& layer, int rows, const float* x, void* inner) {
  const DeviceMatrix& matrix = layer.gate_up;
  const int width = static_cast<int>(config_.mlp);
  if (is_few(rows) && !matrix.bias) {
    const std::size_t half =
        static_cast<std::size_t>(width) * config_.hidden * bytes_of(model_.dtype());
    check(kernels::gated_linear({.type = model_.type(),
                                 .rows = rows,
                                 .n = width,
                                 .k = matrix.k,
                                 .gate = matrix.weight,
                                 .up = static_cast<const std::byte*>(matrix.weight) + half,
                                 .x = x,
                                 .gamma = layer.mlp_norm,
                                 .norm_epsilon = config_.norm_epsilon,
                                 .y = inner},
                                stream_),
          "a gated product");
    return;
  }
  normed(matrix, layer.mlp_norm, x, rows, gate_up_.data());
  check(kernels::silu_gate(model_.type(), gate_up_.data(), rows, width, inner, stream_), "a gate");
}

void LayerProducts::head(const float* x, int rows, float* logits) {
  const DeviceMatrix& matrix = model_.weights().head;
  if (!is_few(rows)) {
    norm(model_.weights().norm, x, rows);
    matmul(matrix, normed_.data(), rows, Output::float32, logits);
    return;
  }
  check(kernels::linear({.type = model_.type(),
                         .rows = rows,
                         .n = matrix.n,
                         .k = matrix.k,
                         .weight = matrix.weight,
                         .x = x,
                         .gamma = model_.weights().norm,
                         .norm_epsilon = config_.norm_epsilon,
                         .bias = nullptr,
                         .y = nullptr,
                         .y_float = logits,
                         .residual = nullptr},
                        stream_),
        "the head");
}

}  // namespace kvlab
