#include "traces/shard_buffer.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>

#include "traces/shard.hpp"

namespace kvlab {
namespace {

constexpr std::uint32_t kLatest = kCheckRows, kSlots = kCheckRows + 1;

/// Which slot each of the sixteen check rows of a shard of `tokens` rows comes from, and its row.
struct CheckSource {
  std::uint32_t slot, row;
};

/// The grid's rows where the shard has them; a short one ends with its last row, repeated.
std::array<CheckSource, kCheckRows> check_sources(std::uint32_t tokens) {
  std::array<CheckSource, kCheckRows> sources{};
  for (std::uint32_t i = 0; i < kCheckRows; ++i)
    sources[i] =
        kCheckGrid[i] < tokens ? CheckSource{i, kCheckGrid[i]} : CheckSource{kLatest, tokens - 1};
  return sources;
}

/// What attention reads has to be finite: a model whose weights overflow is no model to learn from.
/// `tensor` is [heads, tokens, dim], its first token at position `first`.
void refuse_not_finite(const std::filesystem::path& path, const TensorToWrite& tensor,
                       std::uint32_t first) {
  const std::size_t at = first_not_finite(tensor.dtype, tensor.data);
  if (at * bytes_of(tensor.dtype) == tensor.data.size()) return;
  throw std::runtime_error(
      fmt::format("{}: {} at position {} is not finite; the model's weights may be damaged, or too "
                  "large for {}",
                  path.string(), tensor.name, first + at / tensor.shape[2] % tensor.shape[1],
                  torch_name(tensor.dtype)));
}

/// [heads, 17, width] to [heads, 16, width].
std::vector<float> picked(const std::vector<float>& slots, std::uint32_t heads, std::size_t width,
                          const std::array<CheckSource, kCheckRows>& sources) {
  std::vector<float> rows(std::size_t{heads} * kCheckRows * width);
  for (std::size_t h = 0; h < heads; ++h)
    for (std::size_t i = 0; i < kCheckRows; ++i)
      std::copy_n(slots.data() + (h * kSlots + sources[i].slot) * width, width,
                  rows.data() + (h * kCheckRows + i) * width);
  return rows;
}

}  // namespace

LayerRows LayerRows::slice(const ModelShape& shape, std::size_t first, std::size_t count) const {
  const std::size_t query_row = std::size_t{shape.query_heads} * shape.head_size;
  const std::size_t kv_row = std::size_t{shape.kv_heads} * shape.head_size;
  const auto part = [&](std::span<const float> rows, std::size_t width) {
    return rows.empty() ? rows : rows.subspan(first * width, count * width);
  };
  return {part(q, query_row), part(k, kv_row), part(v, kv_row), part(out, query_row),
          part(lse, shape.query_heads)};
}

ShardBuffer::ShardBuffer(const ModelShape& shape, std::uint32_t first)
    : shape_(shape), first_(first), layers_(shape.layers) {
  // Not zeroed: the pages of a short shard's unused rows are then never touched.
  const auto allocate = [&](std::uint32_t heads) {
    return std::make_unique_for_overwrite<std::byte[]>(std::size_t{heads} * kShardTokens *
                                                       shape_.head_size * bytes_of(shape_.dtype));
  };
  for (Layer& layer : layers_) {
    layer.q = allocate(shape_.query_heads);
    layer.k = allocate(shape_.kv_heads);
    layer.v = allocate(shape_.kv_heads);
    layer.out.resize(std::size_t{shape_.query_heads} * kSlots * shape_.head_size);
  }
}

void ShardBuffer::put(std::uint32_t layer_index, std::uint32_t row, std::uint32_t count,
                      const LayerRows& rows) {
  Layer& layer = layers_[layer_index];
  put_heads(layer.q.get(), shape_.query_heads, row, count, rows.q);
  put_heads(layer.k.get(), shape_.kv_heads, row, count, rows.k);
  put_heads(layer.v.get(), shape_.kv_heads, row, count, rows.v);
  if (!rows.lse.empty()) layer.lse.resize(std::size_t{shape_.query_heads} * kSlots);
  for (std::uint32_t slot = 0; slot < kCheckRows; ++slot)
    if (kCheckGrid[slot] >= row && kCheckGrid[slot] < row + count)
      keep_check_row(layer, slot, kCheckGrid[slot] - row, rows);
  keep_check_row(layer, kLatest, count - 1, rows);
}

void ShardBuffer::put_residual(std::uint32_t layer, std::uint32_t row,
                               std::span<const float> norm2) {
  layers_[layer].residual.resize(kShardTokens);
  std::copy(norm2.begin(), norm2.end(), layers_[layer].residual.begin() + row);
}

void ShardBuffer::put_heads(std::byte* to, std::uint32_t heads, std::uint32_t row,
                            std::uint32_t count, std::span<const float> from) const {
  const std::size_t size = shape_.head_size, row_bytes = size * bytes_of(shape_.dtype);
  for (std::size_t i = 0; i < count; ++i)
    for (std::size_t h = 0; h < heads; ++h)
      from_float(shape_.dtype, from.data() + (i * heads + h) * size, size,
                 to + (h * kShardTokens + row + i) * row_bytes);
}

void ShardBuffer::keep_check_row(Layer& layer, std::uint32_t slot, std::uint32_t index,
                                 const LayerRows& rows) {
  const std::size_t heads = shape_.query_heads, size = shape_.head_size;
  for (std::size_t h = 0; h < heads; ++h) {
    std::copy_n(rows.out.data() + (index * heads + h) * size, size,
                layer.out.data() + (h * kSlots + slot) * size);
    if (!rows.lse.empty()) layer.lse[h * kSlots + slot] = rows.lse[index * heads + h];
  }
}

/// Moves the heads of a short shard together: [heads, 1024, head_size] to [heads, tokens,
/// head_size].
std::span<const std::byte> ShardBuffer::compacted(Bytes& bytes, std::uint32_t heads,
                                                  std::uint32_t tokens) const {
  const std::size_t row_bytes = shape_.head_size * bytes_of(shape_.dtype);
  const std::size_t head_bytes = tokens * row_bytes;
  if (tokens < kShardTokens)
    for (std::size_t h = 1; h < heads; ++h)
      std::memmove(bytes.get() + h * head_bytes, bytes.get() + h * kShardTokens * row_bytes,
                   head_bytes);
  return {bytes.get(), heads * head_bytes};
}

std::string ShardBuffer::write(const std::filesystem::path& path, std::uint32_t tokens,
                               const std::map<std::string, std::string>& metadata) {
  const std::size_t n = tokens, heads = shape_.query_heads, kv_heads = shape_.kv_heads,
                    size = shape_.head_size;
  const auto sources = check_sources(tokens);
  std::array<std::int32_t, kCheckRows> rows{};
  for (std::size_t i = 0; i < kCheckRows; ++i)
    rows[i] = static_cast<std::int32_t>(first_ + sources[i].row);
  std::vector<TensorToWrite> tensors{
      {std::string(kCheckRowsTensor), Dtype::i32, {kCheckRows}, std::as_bytes(std::span(rows))}};
  std::vector<std::vector<float>> kept;
  kept.reserve(2 * layers_.size());
  const auto keep = [&](const std::vector<float>& slots, std::size_t width) {
    kept.push_back(picked(slots, shape_.query_heads, width, sources));
    return std::as_bytes(std::span(kept.back()));
  };
  for (std::uint32_t index = 0; index < shape_.layers; ++index) {
    const std::uint32_t l = shape_.number(index);
    Layer& layer = layers_[index];
    tensors.push_back({layer_tensor(l, "q"),
                       shape_.dtype,
                       {heads, n, size},
                       compacted(layer.q, shape_.query_heads, tokens)});
    tensors.push_back({layer_tensor(l, "k"),
                       shape_.dtype,
                       {kv_heads, n, size},
                       compacted(layer.k, shape_.kv_heads, tokens)});
    tensors.push_back({layer_tensor(l, "v"),
                       shape_.dtype,
                       {kv_heads, n, size},
                       compacted(layer.v, shape_.kv_heads, tokens)});
    for (const TensorToWrite& tensor : std::span(tensors).last(3))
      refuse_not_finite(path, tensor, first_);
    tensors.push_back({layer_tensor(l, "check_out"),
                       Dtype::f32,
                       {heads, kCheckRows, size},
                       keep(layer.out, size)});
    if (!layer.residual.empty())
      tensors.push_back({layer_tensor(l, kResidualTensor),
                         Dtype::f32,
                         {n},
                         std::as_bytes(std::span(layer.residual).first(n))});
    if (!layer.lse.empty())
      tensors.push_back(
          {layer_tensor(l, "check_lse"), Dtype::f32, {heads, kCheckRows}, keep(layer.lse, 1)});
  }
  return write_safetensors(path, tensors, metadata);
}

}  // namespace kvlab
