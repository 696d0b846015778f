// Attention over numpy arrays.
#include <fmt/format.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <stdexcept>

#include "policies/tiers/tier_plan.hpp"
#include "sim/cache/host_cache.hpp"
#include "sim/shared_rows.hpp"
#include "tools/python/src/array.hpp"
#include "tools/python/src/bindings.hpp"
#include "tools/python/src/long_call.hpp"
#include "tools/python/src/rows.hpp"
#include "traces/base/cancel.hpp"
#include "traces/manifest.hpp"

namespace kvlab::python {
namespace {

using FloatRows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Heads = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

/// The shape of the arrays. Throws std::invalid_argument unless they fit together.
ModelShape shape_of(const Heads& q, const Heads& k, const Heads& v, const std::string& dtype) {
  for (const Heads* one : {&q, &k, &v})
    for (const std::size_t axis : {std::size_t{0}, std::size_t{1}, std::size_t{2}})
      if (one->shape(axis) == 0 || one->shape(axis) > kMaxTraceTokens)
        throw std::invalid_argument(
            fmt::format("q, k, v: an axis has {} elements; it should have 1 to {}",
                        one->shape(axis), kMaxTraceTokens));
  const auto known = dtype_from_torch(dtype);
  if (!known) throw std::invalid_argument(fmt::format("dtype '{}' is not known", dtype));
  bool alike = q.shape(0) % k.shape(0) == 0 && k.shape(0) == v.shape(0);
  for (const std::size_t axis : {std::size_t{1}, std::size_t{2}})
    alike = alike && q.shape(axis) == k.shape(axis) && k.shape(axis) == v.shape(axis);
  if (!alike)
    throw std::invalid_argument(
        "q, k, v: their numbers of tokens and head sizes should be equal, and q's number of heads "
        "should be a multiple of that of k and v");
  return {.layers = 1,
          .query_heads = static_cast<std::uint32_t>(q.shape(0)),
          .kv_heads = static_cast<std::uint32_t>(k.shape(0)),
          .head_size = static_cast<std::uint32_t>(q.shape(2)),
          .dtype = *known};
}

/// Converts `said`, the description of how a layer attends, and checks that its lengths fit the
/// shape. The computation below relies on these lengths and does not check them.
RowSpec checked_row(const nb::dict& said, const std::vector<Rope>& ropes, float softmax_scale,
                    const ModelShape& shape) {
  RowSpec row = row_of(said, ropes, softmax_scale);
  try {
    check_row(row, shape, 0, "config");
  } catch (const std::runtime_error& wrong) {
    throw std::invalid_argument(wrong.what());
  }
  return row;
}

/// Outputs of full attention [positions, query_heads, head_size] at some positions.
FloatArray attention_outputs(const Heads& q, const Heads& k, const Heads& v, const Tables& inv_freq,
                             const Factors& rope_factor, float softmax_scale,
                             const std::string& dtype, const std::vector<std::uint32_t>& positions,
                             const nb::dict& said) {
  const ModelShape shape = shape_of(q, k, v, dtype);
  const std::uint32_t heads = shape.query_heads, size = shape.head_size, kv_heads = shape.kv_heads,
                      group = shape.group();
  const auto tokens = static_cast<std::uint32_t>(q.shape(1));
  for (const std::uint32_t position : positions)
    if (position >= tokens)
      throw std::invalid_argument(
          fmt::format("position {} does not exist; there are {} tokens", position, tokens));
  const std::size_t head_floats = std::size_t{tokens} * size;
  std::vector<float> outputs(positions.size() * heads * size);
  const RowSpec row = checked_row(said, ropes_of(inv_freq, rope_factor), softmax_scale, shape);
  call_long([&] {
    const RopeTable rope(row.rope, tokens);
    const HeadArithmetic arithmetic{
        .softmax_scale = row.scale,
        .rounding = shape.dtype == Dtype::f32 ? std::nullopt : std::optional(shape.dtype),
        .softcap = row.softcap,
        .window = row.window};
    for (std::uint32_t head = 0; head < kv_heads; ++head) {
      throw_if_cancelled();
      SharedRows rows({.tokens = tokens,
                       .group = group,
                       .head_size = size,
                       .q = q.data() + head * group * head_floats,
                       .q_head_stride = head_floats,
                       .q_token_stride = size,
                       .k = k.data() + head * head_floats,
                       .v = v.data() + head * head_floats,
                       .kv_token_stride = size,
                       .sinks = row.sinks.empty() ? nullptr : &row.sinks.at(head * group)},
                      rope, arithmetic);
      for (std::size_t i = 0; i < positions.size(); ++i) {
        rows.compute(positions[i], 1);
        float* to = outputs.data() + (i * heads + head * group) * size;
        for (std::uint32_t g = 0; g < group; ++g)
          to = std::ranges::copy(rows.output(positions[i], g), to).out;
      }
    }
  });
  return array_of(std::move(outputs), {positions.size(), heads, size});
}

/// Quantizes the rows in the format called `format`, dequantizes them again, and returns them.
FloatArray quantize(const FloatRows& rows, const std::string& format) {
  const RowFormat* const known = find_row_format(format);
  if (!known)
    throw std::invalid_argument(fmt::format("format: '{}' is not a format of one row; known: {}",
                                            format, row_format_names()));
  const std::size_t count = rows.shape(0), size = rows.shape(1);
  check_quantized_heads(static_cast<std::uint32_t>(std::min<std::size_t>(size, UINT32_MAX)));
  std::vector<float> quantized(rows.data(), rows.data() + count * size);
  for (std::size_t i = 0; i < count; ++i)
    quantize_row(std::span(quantized).subspan(i * size, size), *known, RowPart::key);
  return array_of(std::move(quantized), {count, size});
}

}  // namespace

void bind_arrays(nb::module_& module) {
  module.def("quantize", quantize, nb::arg("rows"), nb::arg("format"),
             nb::sig("def quantize(rows: object, format: str) -> object"),
             "Quantizes and dequantizes float32 `rows` [rows, head_size].");
  module.def(
      "attention_outputs", attention_outputs, nb::arg("q"), nb::arg("k"), nb::arg("v"),
      nb::arg("inv_freq"), nb::arg("rope_factor"), nb::arg("softmax_scale"), nb::arg("dtype"),
      nb::arg("positions"), nb::arg("row") = nb::dict(),
      nb::sig(
          "def attention_outputs(q: object, k: object, v: object, inv_freq: Sequence[float] | "
          "Sequence[Sequence[float]], rope_factor: float | Sequence[float], softmax_scale: "
          "float, dtype: str, positions: Sequence[int], row: dict[str, object] = {}) -> object"),
      "Outputs of full attention, [positions, query_heads, head_size]. `q`, `k`, `v`: float32 "
      "[heads, tokens, head_size] before RoPE. `row`: an entry of `rows` as in TraceWriter.");
}

}  // namespace kvlab::python
