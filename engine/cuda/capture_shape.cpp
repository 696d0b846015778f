#include "engine/cuda/capture_shape.hpp"

namespace kvlab {
namespace {

constexpr std::size_t kAlignment = 256;

std::size_t aligned(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

std::size_t qkv_bytes(const CaptureShape& shape, std::size_t rows) {
  return rows * (shape.query_heads + 2 * shape.kv_heads) * shape.head_size * bytes_of(shape.dtype);
}
std::size_t out_bytes(const CaptureShape& shape, std::size_t rows) {
  return rows * shape.query_heads * shape.head_size * bytes_of(shape.dtype);
}
std::size_t chunks_bytes(const CaptureShape& shape, std::size_t tokens) {
  return 2 * shape.offsets(tokens).end;
}
std::size_t step_bytes(const CaptureShape& shape, std::size_t rows) {
  return shape.layers * shape.offsets(rows).end;
}

/// Rows of `width` out of rows of `stride` elements, widened.
void widen_rows(Dtype dtype, const std::byte* from, std::size_t rows, std::size_t stride,
                std::size_t width, std::vector<float>& to) {
  to.resize(rows * width);
  const std::size_t element = bytes_of(dtype);
  for (std::size_t row = 0; row < rows; ++row)
    to_float(dtype, from + row * stride * element, width, to.data() + row * width);
}

}  // namespace

CaptureShape::Offsets CaptureShape::offsets(std::size_t tokens) const {
  const std::size_t element = bytes_of(dtype), q = std::size_t{query_heads} * head_size,
                    kv = std::size_t{kv_heads} * head_size;
  Offsets at{};
  at.out = aligned(tokens * (q + 2 * kv) * element);
  at.lse = at.out + aligned(tokens * q * element);
  at.plain_q = at.lse + aligned(tokens * query_heads * sizeof(float));
  at.plain_k = at.plain_q + (plain ? aligned(tokens * q * element) : 0);
  at.end = at.plain_k + (plain ? aligned(tokens * kv * element) : 0);
  return at;
}

CaptureShape capture_shape(const ModelConfig& config, Dtype dtype) {
  return {.dtype = dtype,
          .layers = config.layers,
          .query_heads = config.query_heads,
          .kv_heads = config.kv_heads,
          .head_size = config.head_size,
          .plain = config.qk_norm};
}

void CapturedLayer::read(const CaptureShape& shape, const std::byte* data, std::size_t tokens) {
  const CaptureShape::Offsets at = shape.offsets(tokens);
  const std::size_t element = bytes_of(shape.dtype);
  const std::size_t queries = std::size_t{shape.query_heads} * shape.head_size;
  const std::size_t kv = std::size_t{shape.kv_heads} * shape.head_size;
  const std::size_t row = queries + 2 * kv;
  const std::byte* const qkv = data + at.qkv;
  if (shape.plain) {
    widen_rows(shape.dtype, data + at.plain_q, tokens, queries, queries, q);
    widen_rows(shape.dtype, data + at.plain_k, tokens, kv, kv, k);
  } else {
    widen_rows(shape.dtype, qkv, tokens, row, queries, q);
    widen_rows(shape.dtype, qkv + queries * element, tokens, row, kv, k);
  }
  widen_rows(shape.dtype, qkv + (queries + kv) * element, tokens, row, kv, v);
  widen_rows(shape.dtype, data + at.out, tokens, queries, queries, out);
  const auto* const from = reinterpret_cast<const float*>(data + at.lse);
  lse.assign(from, from + tokens * shape.query_heads);
}

LayerOutputMemory::LayerOutputMemory(const CaptureShape& shape, Rows rows, bool keep,
                                     cudaStream_t stream)
    : shape_(shape),
      rows_(rows),
      keep_(keep),
      qkv_(qkv_bytes(shape, rows.most()), "queries, keys and values"),
      out_(out_bytes(shape, rows.most()), "attention outputs") {
  // Attention writes nothing for idle rows; what follows still computes on them.
  cuda::check(cudaMemsetAsync(out_.data(), 0, out_.bytes(), stream), "attention outputs");
  if (!keep) return;
  chunks_ = cuda::DeviceBuffer(chunks_bytes(shape, rows.chunk), "capture");
  step_ = cuda::DeviceBuffer(step_bytes(shape, rows.step), "capture");
  cuda::check(cudaMemsetAsync(step_.data(), 0, step_.bytes(), stream), "capture");
}

std::size_t LayerOutputMemory::bytes(const CaptureShape& shape, Rows rows, bool keep) {
  return qkv_bytes(shape, rows.most()) + out_bytes(shape, rows.most()) +
         (keep ? chunks_bytes(shape, rows.chunk) + step_bytes(shape, rows.step) : 0);
}

LayerOutputs LayerOutputMemory::captured_at(std::byte* base, std::size_t tokens) const {
  const CaptureShape::Offsets at = shape_.offsets(tokens);
  return {.qkv = base,
          .out = base + at.out,
          .lse = reinterpret_cast<float*>(base + at.lse),
          .plain_q = shape_.plain ? base + at.plain_q : nullptr,
          .plain_k = shape_.plain ? base + at.plain_k : nullptr};
}

LayerOutputs LayerOutputMemory::next_chunk(std::size_t tokens) {
  if (!keep_) return {qkv_.data(), out_.data(), nullptr, nullptr, nullptr};
  half_ = 1 - half_;
  return captured_at(chunks_.data() + half_ * (chunks_.bytes() / 2), tokens);
}

LayerOutputs LayerOutputMemory::step(std::uint32_t layer) const {
  if (!keep_) return {qkv_.data(), out_.data(), nullptr, nullptr, nullptr};
  return captured_at(step_.data() + layer * shape_.offsets(rows_.step).end, rows_.step);
}

}  // namespace kvlab
