#include "engine/cuda/model/layer_products.hpp"

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

kernels::LinearArgs LayerProducts::added_args(const DeviceMatrix& matrix, const void* input,
                                              int rows, float* x) const {
  return {.type = model_.type(),
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
          .residual = x};
}

kernels::LinearArgs LayerProducts::normed_args(const DeviceMatrix& matrix, const void* gamma,
                                               const float* x, int rows) const {
  kernels::LinearArgs args = added_args(matrix, x, rows, nullptr);
  args.gamma = gamma;
  args.norm_epsilon = config_.norm_epsilon;
  return args;
}

kernels::LinearArgs LayerProducts::head_args(const float* x, int rows, float* logits) const {
  kernels::LinearArgs args = normed_args(model_.weights().head, model_.weights().norm, x, rows);
  args.y_float = logits;
  return args;
}

kernels::GatedLinearArgs LayerProducts::gated_args(const DeviceLayer& layer, int rows,
                                                   const float* x, void* inner) const {
  const auto* const gate = static_cast<const std::byte*>(layer.gate_up.weight);
  return {.type = model_.type(),
          .rows = rows,
          .n = static_cast<int>(config_.mlp),
          .k = layer.gate_up.k,
          .gate = gate,
          .up = gate + std::size_t{config_.mlp} * config_.hidden * bytes_of(model_.dtype()),
          .x = x,
          .gamma = layer.mlp_norm,
          .norm_epsilon = config_.norm_epsilon,
          .y = inner};
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

void LayerProducts::qkv(const DeviceLayer& layer, const float* x, void* qkv,
                        kernels::RopeWriteArgs write) {
  write.qkv = qkv;
  if (is_few(write.tokens)) {
    kernels::LinearArgs args = normed_args(layer.qkv, layer.input_norm, x, write.tokens);
    args.y = qkv;
    check(kernels::linear_rope_write(args, write, stream_), "queries, keys and values");
    return;
  }
  norm(layer.input_norm, x, write.tokens);
  matmul(layer.qkv, normed_.data(), write.tokens, Output::type, qkv);
  check(kernels::rope_write(write, stream_), "RoPE");
}

void LayerProducts::added(const DeviceMatrix& matrix, const void* input, int rows, float* x) {
  if (is_few(rows)) {
    check(kernels::linear(added_args(matrix, input, rows, x), stream_), "a product");
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
  if (is_few(rows) && !matrix.bias) {
    check(kernels::gated_linear(gated_args(layer, rows, x, inner), stream_), "a gated product");
    return;
  }
  if (is_few(rows)) {
    kernels::LinearArgs args = normed_args(matrix, layer.mlp_norm, x, rows);
    args.y = gate_up_.data();
    check(kernels::linear(args, stream_), "a product");
  } else {
    norm(layer.mlp_norm, x, rows);
    matmul(matrix, normed_.data(), rows, Output::type, gate_up_.data());
  }
  check(kernels::silu_gate(model_.type(), gate_up_.data(), rows, static_cast<int>(config_.mlp),
                           inner, stream_),
        "a gate");
}

void LayerProducts::head(const float* x, int rows, float* logits) {
  if (is_few(rows)) {
    check(kernels::linear(head_args(x, rows, logits), stream_), "the head");
  } else {
    norm(model_.weights().norm, x, rows);
    matmul(model_.weights().head, normed_.data(), rows, Output::float32, logits);
  }
}

}  // namespace kvlab
