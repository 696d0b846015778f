#include "engine/cuda/capture_shape.hpp"

namespace kvlab {
namespace {

/// Converts rows of `width` elements, `stride` elements apart, to float32.
void widen_rows(Dtype dtype, const std::byte* from, std::size_t rows, std::size_t stride,
                std::size_t width, std::vector<float>& to) {
  to.resize(rows * width);
  const std::size_t element = bytes_of(dtype);
  for (std::size_t row = 0; row < rows; ++row)
    to_float(dtype, from + row * stride * element, width, to.data() + row * width);
}

}  // namespace

CaptureShape::Offsets CaptureShape::offsets(std::size_t tokens) const {
  cuda::Arena arena;
  const auto take = [&](std::size_t elements, std::size_t element) {
    const std::size_t at = arena.bytes();
    arena.take<std::byte>(tokens * elements * element);
    return at;
  };
  const std::size_t element = bytes_of(dtype), q = std::size_t{query_heads} * head_size,
                    kv = std::size_t{kv_heads} * head_size;
  Offsets at{};
  at.qkv = take(q + 2 * kv, element);
  at.out = take(q, element);
  at.lse = take(query_heads, sizeof(float));
  at.norm2 = take(residuals ? 1 : 0, sizeof(float));
  at.plain_q = take(plain ? q : 0, element);
  at.plain_k = take(plain ? kv : 0, element);
  at.end = arena.bytes();
  return at;
}

CaptureShape capture_shape(const ModelConfig& config, Dtype dtype) {
  return {.dtype = dtype,
          .layers = config.layers,
          .query_heads = config.query_heads,
          .kv_heads = config.kv_heads,
          .head_size = config.head_size,
          .plain = config.norms_each_head(),
          .residuals = config.norms.post_attention.empty()};
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
  const auto* const norms = reinterpret_cast<const float*>(data + at.norm2);
  norm2.assign(norms, norms + (shape.residuals ? tokens : 0));
}

LayerOutputMemory::Parts::Parts(cuda::Arena& arena, const CaptureShape& shape, Rows rows,
                                bool keep) {
  if (keep) {
    chunks = arena.take<std::byte>(2 * shape.offsets(rows.chunk).end);
    step = arena.take<std::byte>(shape.layers * shape.offsets(rows.step).end);
  } else {
    const CaptureShape::Offsets at = shape.offsets(rows.max_rows());
    one = arena.take<std::byte>(at.lse);
  }
}

LayerOutputMemory::LayerOutputMemory(const CaptureShape& shape, Rows rows, bool keep,
                                     cudaStream_t stream)
    : shape_(shape),
      rows_(rows),
      keep_(keep),
      memory_("queries, keys and values", shape, rows, keep) {
  // Attention writes no output for idle rows, but later launches read these rows, so they must be
  // initialized.
  const cuda::DeviceBuffer& all = memory_.memory();
  cuda::check(cudaMemsetAsync(all.data(), 0, all.bytes(), stream), "attention outputs");
}

LayerOutputs LayerOutputMemory::captured_at(std::byte* base, std::size_t tokens) const {
  const CaptureShape::Offsets at = shape_.offsets(tokens);
  return {.qkv = base,
          .out = base + at.out,
          .lse = reinterpret_cast<float*>(base + at.lse),
          .norm2 = shape_.residuals ? reinterpret_cast<float*>(base + at.norm2) : nullptr,
          .plain_q = shape_.plain ? base + at.plain_q : nullptr,
          .plain_k = shape_.plain ? base + at.plain_k : nullptr};
}

LayerOutputs LayerOutputMemory::passing() const {
  const std::size_t out = shape_.offsets(rows_.max_rows()).out;
  return {memory_->one, memory_->one + out, nullptr, nullptr, nullptr, nullptr};
}

LayerOutputs LayerOutputMemory::next_chunk(std::size_t tokens) {
  if (!keep_) return passing();
  half_ = 1 - half_;
  return captured_at(memory_->chunks + half_ * shape_.offsets(rows_.chunk).end, tokens);
}

LayerOutputs LayerOutputMemory::step(std::uint32_t layer) const {
  if (!keep_) return passing();
  return captured_at(memory_->step + layer * shape_.offsets(rows_.step).end, rows_.step);
}

}  // namespace kvlab
