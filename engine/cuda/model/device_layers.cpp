#include "engine/cuda/model/device_layers.hpp"

#include "kernels/pointwise.hpp"

namespace kvlab {
namespace {

std::size_t inner_bytes(const DeviceModel& model, std::size_t rows) {
  return rows * model.config().mlp * bytes_of(model.dtype());
}

}  // namespace

DeviceLayers::DeviceLayers(const DeviceModel& model, int rows, cudaStream_t stream)
    : model_(model),
      config_(model.config()),
      stream_(stream),
      products_(model, rows, stream),
      inner_(inner_bytes(model, static_cast<std::size_t>(rows)), "the MLP") {}

std::size_t DeviceLayers::bytes(const DeviceModel& model, std::size_t rows) {
  return LayerProducts::bytes(model, rows) + inner_bytes(model, rows);
}

void DeviceLayers::embed(const std::int32_t* ids, int rows, float* x) {
  cuda::check(kernels::embed(model_.type(), model_.weights().embedding,
                             static_cast<int>(config_.hidden), ids, rows, x, stream_),
              "embedding");
}

void DeviceLayers::qkv(std::uint32_t layer, int rows, const float* x, const LayerOutputs& to,
                       kernels::RopeWriteArgs write) {
  write.type = model_.type();
  write.tokens = rows;
  write.query_heads = static_cast<int>(config_.query_heads);
  write.kv_heads = static_cast<int>(config_.kv_heads);
  write.head_size = static_cast<int>(config_.head_size);
  write.q_gamma = weights(layer).q_norm;
  write.k_gamma = weights(layer).k_norm;
  write.norm_epsilon = config_.norm_epsilon;
  write.plain_q = to.plain_q;
  write.plain_k = to.plain_k;
  products_.qkv(weights(layer), x, to.qkv, write);
}

void DeviceLayers::output(std::uint32_t layer, int rows, float* x, const LayerOutputs& to) {
  products_.added(weights(layer).output, to.out, rows, x);
}

void DeviceLayers::gated(std::uint32_t layer, int rows, const float* x) {
  products_.gated(weights(layer), rows, x, inner_.data());
}

void DeviceLayers::down(std::uint32_t layer, int rows, float* x) {
  products_.added(weights(layer).down, inner_.data(), rows, x);
}

void DeviceLayers::head(const float* x, int rows, float* logits) {
  products_.head(x, rows, logits);
}

std::uint64_t DeviceLayers::weight_bytes(DeviceMatrix DeviceLayer::*matrix) const {
  std::uint64_t bytes = 0;
  for (const DeviceLayer& layer : model_.weights().layers)
    bytes += std::uint64_t{static_cast<unsigned>((layer.*matrix).n)} *
             static_cast<unsigned>((layer.*matrix).k) * bytes_of(model_.dtype());
  return bytes;
}

std::uint64_t DeviceLayers::head_bytes() const {
  return std::uint64_t{config_.vocab} * config_.hidden * bytes_of(model_.dtype());
}

}  // namespace kvlab
