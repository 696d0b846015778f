#include "engine/cuda/model/device_layers.hpp"

#include "kernels/launch_plans.hpp"

namespace kvlab {
namespace {

using cuda::check;
using Output = cuda::ProductArgs::Output;

/// Whether the device has enough shared memory for the kernels for few rows, which keep a row's
/// hidden states in shared memory.
bool has_few(const DeviceModel& model) {
  using kernels::Form;
  kernels::DeviceLimits limits;
  check(kernels::device_limits(limits), "reading the device's limits");
  const auto hidden = static_cast<int>(model.config().hidden);
  return kernels::why_not_linear(model.type(), Form::normed, hidden, limits).empty() &&
         kernels::why_not_linear(model.type(), Form::plain, hidden, limits).empty();
}

}  // namespace

DeviceLayers::Work::Work(cuda::Arena& arena, const DeviceModel& model, int rows) {
  const std::size_t row = static_cast<std::size_t>(rows) * bytes_of(model.dtype());
  const Experts& experts = model.config().experts;
  const std::size_t pairs = static_cast<std::size_t>(rows) * experts.chosen;
  const std::size_t width = std::max(model.config().mlp, experts.chosen * experts.mlp);
  normed = arena.take<std::byte>(row * model.config().hidden);
  gate_up = arena.take<std::byte>(row * 2 * width);
  inner = arena.take<std::byte>(row * width);
  expert_outputs = arena.take<float>(pairs * model.config().hidden);
  logits = arena.take<float>(static_cast<std::size_t>(rows) * experts.count);
  routes.experts = static_cast<int>(experts.count);
  routes.chosen = static_cast<int>(experts.chosen);
  routes.shares = arena.take<float>(pairs);
  routes.expert = arena.take<std::int32_t>(pairs);
  routes.order = arena.take<std::int32_t>(pairs);
  routes.starts = arena.take<std::int32_t>(experts.count + 1);
  post_norm_input = arena.take<float>(model.config().norms.post_attention.empty()
                                          ? 0
                                          : static_cast<std::size_t>(rows) * model.config().hidden);
}

DeviceLayers::DeviceLayers(const DeviceModel& model, int rows, cudaStream_t stream)
    : model_(model),
      config_(model.config()),
      stream_(stream),
      few_(has_few(model) ? kernels::kMaxLinearRows : 0),
      work_("the layers", model, rows) {}

bool DeviceLayers::is_few(int rows) const { return rows <= few_; }

void DeviceLayers::embed(const std::int32_t* ids, int rows, float* x) {
  check(kernels::embed(model_.type(), model_.weights().embedding, static_cast<int>(config_.hidden),
                       config_.embedding_scale, ids, rows, x, stream_),
        "embedding");
}

void DeviceLayers::qkv(std::uint32_t layer, int rows, const float* x, const LayerOutputs& to,
                       kernels::RopeWriteArgs write) {
  const DeviceLayer& w = weights(layer);
  write.cache.type = model_.type();
  write.tokens = rows;
  write.cache.query_heads = static_cast<int>(config_.query_heads);
  write.cache.kv_heads = static_cast<int>(config_.kv_heads);
  write.cache.head_size = static_cast<int>(config_.head_size);
  write.qkv = to.qkv;
  const bool whole = config_.whole_qk_norm;
  write.q_gamma = whole ? nullptr : w.q_norm;
  write.k_gamma = whole ? nullptr : w.k_norm;
  write.norm_epsilon = config_.norm_epsilon;
  write.norm_offset = config_.norm_offset;
  write.plain_q = to.plain_q;
  if (to.plain_k) write.plain_k = to.plain_k;
  if (is_few(rows)) {
    kernels::LinearArgs args = few_normed(w.qkv, w.input_norm, x, rows);
    args.y = to.qkv;
    if (!whole)
      return check(kernels::linear_rope_write(args, write, stream_), "queries, keys and values");
    check(kernels::linear(args, stream_), "queries, keys and values");
  } else {
    matmul(w.qkv, normalize(w.input_norm, x, rows), rows, Output::type, to.qkv);
  }
  if (whole) norm_all_heads(w, rows, to.qkv);
  check(kernels::rope_write(write, stream_), "RoPE");
}

void DeviceLayers::norm_all_heads(const DeviceLayer& w, int rows, std::byte* qkv) {
  const auto head = static_cast<int>(config_.head_size),
             q = static_cast<int>(config_.query_heads) * head,
             kv = static_cast<int>(config_.kv_heads) * head;
  const auto norm = [&](std::byte* at, const void* gamma, int width) {
    check(
        kernels::norm_in_place(model_.type(), at, q + 2 * kv, norm_of(gamma), rows, width, stream_),
        "norms of queries and keys");
  };
  norm(qkv, w.q_norm, q);
  norm(qkv + config_.query_heads * model_.key_bytes(), w.k_norm, kv);
}

void DeviceLayers::output(std::uint32_t layer, int rows, float* x, const LayerOutputs& to) {
  add(weights(layer).output, weights(layer).post_attention, to.out, rows, x);
  if (to.norm2)
    check(kernels::squared_norms(x, rows, static_cast<int>(config_.hidden), to.norm2, stream_),
          "norms of the residual stream");
}

void DeviceLayers::gate_up(std::uint32_t layer, int rows, const float* x) {
  const DeviceLayer& w = weights(layer);
  if (w.router.n > 0) return gated_experts(w, rows, x);
  const DeviceMatrix& matrix = w.gate_up;
  const auto mlp = static_cast<int>(config_.mlp);
  if (is_few(rows) && !matrix.bias && w.mlp_norm) {
    const auto* const gate = static_cast<const std::byte*>(matrix.weight);
    check(kernels::gated_linear(
              {.type = model_.type(),
               .rows = rows,
               .n = mlp,
               .k = matrix.k,
               .gate = gate,
               .up = gate + std::size_t{config_.mlp} * config_.hidden * bytes_of(model_.dtype()),
               .x = x,
               .gamma = w.mlp_norm,
               .norm_epsilon = config_.norm_epsilon,
               .y = work_->inner,
               .norm_offset = config_.norm_offset,
               .activation = activation()},
              stream_),
          "a gated product");
    return;
  }
  if (is_few(rows)) {
    kernels::LinearArgs args = few_normed(matrix, w.mlp_norm, x, rows);
    args.y = work_->gate_up;
    check(kernels::linear(args, stream_), "a product");
  } else {
    matmul(matrix, normalize(w.mlp_norm, x, rows), rows, Output::type, work_->gate_up);
  }
  check(kernels::gate(model_.type(), activation(), config_.clamp, work_->gate_up, rows, mlp,
                      work_->inner, stream_),
        "a gate");
}

kernels::ExpertProductArgs DeviceLayers::expert_product(const DeviceMatrix& matrix,
                                                        int rows) const {
  kernels::ExpertProductArgs args{.type = model_.type(),
                                  .routes = work_->routes,
                                  .n = matrix.n,
                                  .k = matrix.k,
                                  .weight = matrix.weight,
                                  .bias = matrix.bias};
  args.routes.tokens = rows;
  return args;
}

void DeviceLayers::gated_experts(const DeviceLayer& w, int rows, const float* x) {
  kernels::ExpertProductArgs args = expert_product(w.gate_up, rows);
  args.x = work_->normed;
  args.by_token = true;
  args.y = work_->gate_up;
  check(kernels::route({.type = model_.type(),
                        .routes = args.routes,
                        .hidden = static_cast<int>(config_.hidden),
                        .x = x,
                        .norm = norm_of(w.mlp_norm),
                        .weight = w.router.weight,
                        .bias = w.router.bias,
                        .among_chosen = config_.experts.among_chosen,
                        .normed = work_->normed,
                        .logits = work_->logits},
                       stream_),
        "a router");
  check(kernels::expert_product(args, stream_), "a product of experts");
  check(kernels::gate(model_.type(), activation(), config_.clamp, work_->gate_up,
                      args.routes.pairs(), w.down.k, work_->inner, stream_),
        "a gate");
}

void DeviceLayers::down_experts(const DeviceLayer& w, int rows, float* x) {
  kernels::ExpertProductArgs args = expert_product(w.down, rows);
  args.x = work_->inner;
  args.y_float = work_->expert_outputs;
  check(kernels::expert_product(args, stream_), "a product of experts");
  check(kernels::add_shares(args.routes, work_->expert_outputs, static_cast<int>(config_.hidden), x,
                            stream_),
        "a sum of experts");
}

void DeviceLayers::down(std::uint32_t layer, int rows, float* x) {
  if (weights(layer).router.n > 0) return down_experts(weights(layer), rows, x);
  add(weights(layer).down, weights(layer).post_mlp, work_->inner, rows, x);
}

void DeviceLayers::head(const float* x, int rows, float* logits) {
  const DeviceWeights& w = model_.weights();
  if (is_few(rows)) {
    kernels::LinearArgs args = few_normed(w.head, w.norm, x, rows);
    args.y_float = logits;
    check(kernels::linear(args, stream_), "the head");
  } else {
    matmul(w.head, normalize(w.norm, x, rows), rows, Output::float32, logits);
  }
}

void DeviceLayers::add(const DeviceMatrix& matrix, const void* post_norm, const void* input,
                       int rows, float* x) {
  if (is_few(rows)) {
    kernels::LinearArgs args = few(matrix, input, rows);
    (post_norm ? args.y_float : args.residual) = post_norm ? work_->post_norm_input : x;
    check(kernels::linear(args, stream_), "a product");
  } else if (post_norm) {
    matmul(matrix, input, rows, Output::float32, work_->post_norm_input);
  } else if (!matrix.bias) {
    matmul(matrix, input, rows, Output::add_float32, x);
  } else {
    matmul(matrix, input, rows, Output::type, work_->normed);
    check(kernels::add_residual(model_.type(), work_->normed,
                                static_cast<std::size_t>(rows) * config_.hidden, x, stream_),
          "a sum");
  }
  if (post_norm)
    check(kernels::add_normed(model_.type(), work_->post_norm_input, norm_of(post_norm), rows,
                              static_cast<int>(config_.hidden), x, stream_),
          "a norm after a block");
}

kernels::LinearArgs DeviceLayers::few(const DeviceMatrix& matrix, const void* x, int rows) const {
  return {.type = model_.type(),
          .rows = rows,
          .n = matrix.n,
          .k = matrix.k,
          .weight = matrix.weight,
          .x = x,
          .gamma = nullptr,
          .norm_epsilon = 0,
          .bias = matrix.bias,
          .y = nullptr,
          .y_float = nullptr,
          .residual = nullptr};
}

kernels::LinearArgs DeviceLayers::few_normed(const DeviceMatrix& matrix, const void* gamma,
                                             const float* x, int rows) {
  if (!gamma) return few(matrix, normalize(nullptr, x, rows), rows);
  kernels::LinearArgs args = few(matrix, x, rows);
  args.gamma = gamma;
  args.norm_epsilon = config_.norm_epsilon;
  args.norm_offset = config_.norm_offset;
  return args;
}

const std::byte* DeviceLayers::normalize(const void* gamma, const float* x, int rows) {
  check(kernels::rms_norm(model_.type(), x, norm_of(gamma), rows, static_cast<int>(config_.hidden),
                          work_->normed, stream_),
        "a norm");
  return work_->normed;
}

void DeviceLayers::matmul(const DeviceMatrix& matrix, const void* input, int rows, Output output,
                          void* y) {
  products_({.type = model_.type(),
             .rows = rows,
             .n = matrix.n,
             .k = matrix.k,
             .x = input,
             .x_row = matrix.k,
             .w = matrix.weight,
             .w_row = matrix.k,
             .bias = matrix.bias,
             .y = y,
             .y_row = matrix.n,
             .output = output},
            stream_);
}

std::uint64_t DeviceLayers::weight_bytes(DeviceMatrix DeviceLayer::*matrix) const {
  std::uint64_t bytes = 0;
  for (const DeviceLayer& layer : model_.weights().layers)
    bytes += std::uint64_t{static_cast<unsigned>((layer.*matrix).n)} *
             static_cast<unsigned>((layer.*matrix).k) * bytes_of(model_.dtype()) *
             ((layer.*matrix).experts > 0 ? config_.experts.chosen : 1);
  return bytes;
}

std::uint64_t DeviceLayers::head_bytes() const {
  return std::uint64_t{config_.vocab} * config_.hidden * bytes_of(model_.dtype());
}

}  // namespace kvlab
