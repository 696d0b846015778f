#include "sim/array_trace.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <stdexcept>
#include <vector>

#include "sim/head_view.hpp"
#include "sim/shared_rows.hpp"
#include "traces/base/cancel.hpp"
#include "traces/shard.hpp"

namespace kvlab {
namespace {

/// Tokens [first, first + count) of all heads of a layer: [count, heads, size].
std::vector<float> rows_of(const StridedTensor& tensor, std::uint32_t layer, std::uint32_t heads,
                           std::uint32_t size, std::uint32_t first, std::uint32_t count) {
  std::vector<float> rows(std::size_t{count} * heads * size);
  for (std::uint32_t t = 0; t < count; ++t)
    for (std::uint32_t h = 0; h < heads; ++h)
      tensor.read(layer, h, first + t, size, rows.data() + (std::size_t{t} * heads + h) * size);
  return rows;
}

/// All tokens of some heads: [head, token, size].
std::vector<float> heads_of(const StridedTensor& tensor, std::uint32_t layer, std::uint32_t first,
                            std::uint32_t count, std::uint32_t tokens, std::uint32_t size) {
  std::vector<float> heads(std::size_t{count} * tokens * size);
  for (std::uint32_t h = 0; h < count; ++h)
    for (std::uint32_t t = 0; t < tokens; ++t)
      tensor.read(layer, first + h, t, size, heads.data() + (std::size_t{h} * tokens + t) * size);
  return heads;
}

void refuse_not_finite(std::string_view name, std::span<const float> values, std::uint32_t layer) {
  for (const float value : values)
    if (!std::isfinite(value))
      throw std::invalid_argument(
          fmt::format("{}: layer {} holds {}; finite numbers are expected", name, layer, value));
}

/// Whether a shard of `tokens` tokens keeps the output of its row `row`: those of the grid and the
/// last.
bool may_be_checked(std::uint32_t row, std::uint32_t tokens) {
  if (row + 1 == tokens) return true;
  return std::ranges::find(kCheckGrid, row) != kCheckGrid.end();
}

class ArrayTrace {
 public:
  ArrayTrace(const TraceHeader& header, const SequenceTensors& tensors)
      : header_(header),
        shape_(header.shape),
        tensors_(tensors),
        tokens_(static_cast<std::uint32_t>(tensors.ids.size())) {
    for (std::uint32_t first = 0; first < tokens_; first += kShardTokens) {
      const std::uint32_t count = std::min(kShardTokens, tokens_ - first);
      for (std::uint32_t row = 0; row < count; ++row)
        if (may_be_checked(row, count)) checked_.push_back(first + row);
    }
  }

  void write(const std::filesystem::path& directory) {
    TraceWriter writer(directory, header_);
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) compute_outputs(layer);
    for (std::uint32_t first = 0; first < tokens_;) {
      const bool prompt = first < tensors_.prompt_tokens;
      const std::uint32_t end = std::min((first / kShardTokens + 1) * kShardTokens,
                                         prompt ? tensors_.prompt_tokens : tokens_);
      admit(writer, first, end - first, prompt ? SegmentKind::prompt : SegmentKind::decode);
      first = end;
    }
    writer.finish();
  }

 private:
  /// Attention at the checked positions, by KV head.
  void compute_outputs(std::uint32_t layer) {
    const RopeTable rope(header_.rope, tokens_);
    const HeadArithmetic arithmetic{.softmax_scale = header_.softmax_scale,
                                    .rounding = header_.rounding == Rounding::model_dtype
                                                    ? std::optional(shape_.dtype)
                                                    : std::nullopt};
    const std::uint32_t group = shape_.group(), size = shape_.head_size;
    for (std::uint32_t kv_head = 0; kv_head < shape_.kv_heads; ++kv_head) {
      throw_if_cancelled();
      const auto q = heads_of(tensors_.q, layer, kv_head * group, group, tokens_, size);
      const auto k = heads_of(tensors_.k, layer, kv_head, 1, tokens_, size);
      const auto v = heads_of(tensors_.v, layer, kv_head, 1, tokens_, size);
      refuse_not_finite("q", q, layer);
      refuse_not_finite("k", k, layer);
      refuse_not_finite("v", v, layer);
      SharedRows rows({.tokens = tokens_,
                       .group = group,
                       .head_size = size,
                       .q = q.data(),
                       .q_head_stride = std::size_t{tokens_} * size,
                       .q_token_stride = size,
                       .k = k.data(),
                       .v = v.data(),
                       .kv_token_stride = size},
                      rope, arithmetic);
      for (const std::uint32_t position : checked_) {
        rows.compute(position, 1);
        auto& out = outputs_[{layer, position}];
        for (std::uint32_t g = 0; g < group; ++g) {
          const auto one = rows.output(position, g);
          out.insert(out.end(), one.begin(), one.end());
        }
      }
    }
  }

  void admit(TraceWriter& writer, std::uint32_t first, std::uint32_t count, SegmentKind kind) {
    throw_if_cancelled();
    const std::uint32_t size = shape_.head_size;
    writer.begin(tensors_.ids.subspan(first, count), kind);
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      const auto q = rows_of(tensors_.q, layer, shape_.query_heads, size, first, count);
      const auto k = rows_of(tensors_.k, layer, shape_.kv_heads, size, first, count);
      const auto v = rows_of(tensors_.v, layer, shape_.kv_heads, size, first, count);
      std::vector<float> out(q.size());
      for (std::uint32_t t = 0; t < count; ++t)
        if (const auto found = outputs_.find({layer, first + t}); found != outputs_.end())
          std::ranges::copy(found->second,
                            out.begin() + std::ptrdiff_t{t} * shape_.query_heads * size);
      writer.layer(layer, q, k, v, out, {});
    }
    writer.end();
  }

  const TraceHeader& header_;
  const ModelShape& shape_;
  const SequenceTensors& tensors_;
  std::uint32_t tokens_;
  std::vector<std::uint32_t> checked_;  // positions, ascending
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::vector<float>>
      outputs_;  // of (layer, position): [query_heads, size]
};

}  // namespace

void StridedTensor::read(std::uint32_t layer, std::uint32_t head, std::uint32_t token,
                         std::uint32_t size, float* to) const {
  const auto bytes = static_cast<std::int64_t>(bytes_of(dtype));
  const std::byte* from =
      data + (layer * strides[0] + head * strides[1] + token * strides[2]) * bytes;
  if (strides[3] == 1) return to_float(dtype, from, size, to);
  for (std::uint32_t d = 0; d < size; ++d)
    to_float(dtype, from + d * strides[3] * bytes, 1, to + d);
}

void write_array_trace(const std::filesystem::path& directory, const TraceHeader& header,
                       const SequenceTensors& tensors) {
  ArrayTrace(header, tensors).write(directory);
}

}  // namespace kvlab
