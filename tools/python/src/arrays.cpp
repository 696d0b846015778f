// Attention of arrays.
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "sim/shared_rows.hpp"
#include "tools/python/src/array.hpp"
#include "tools/python/src/bindings.hpp"
#include "tools/python/src/long_call.hpp"
#include "tools/python/src/rows.hpp"
#include "traces/base/cancel.hpp"

namespace kvlab::python {
namespace {

using Heads = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

/// [positions, query_heads, head_size]: what full attention puts out there.
FloatArray attention_outputs(const Heads& q, const Heads& k, const Heads& v, const Tables& inv_freq,
                             const Factors& rope_factor, float softmax_scale,
                             const std::string& dtype, const std::vector<std::uint32_t>& positions,
                             const nb::dict& said) {
  const auto heads = static_cast<std::uint32_t>(q.shape(0)),
             tokens = static_cast<std::uint32_t>(q.shape(1)),
             size = static_cast<std::uint32_t>(q.shape(2)),
             kv_heads = static_cast<std::uint32_t>(k.shape(0)), group = heads / kv_heads;
  const std::size_t head_floats = std::size_t{tokens} * size;
  const Dtype rounded = dtype_from_torch(dtype).value();
  std::vector<float> outputs(positions.size() * heads * size);
  const RowSpec row = row_of(said, ropes_of(inv_freq, rope_factor), softmax_scale);
  call_long([&] {
    const RopeTable rope(row.rope, tokens);
    const HeadArithmetic arithmetic{
        .softmax_scale = row.scale,
        .rounding = rounded == Dtype::f32 ? std::nullopt : std::optional(rounded),
        .softcap = row.softcap,
        .span = row.span};
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

}  // namespace

void bind_arrays(nb::module_& module) {
  module.def(
      "attention_outputs", attention_outputs, nb::arg("q"), nb::arg("k"), nb::arg("v"),
      nb::arg("inv_freq"), nb::arg("rope_factor"), nb::arg("softmax_scale"), nb::arg("dtype"),
      nb::arg("positions"), nb::arg("row") = nb::dict(),
      nb::sig(
          "def attention_outputs(q: object, k: object, v: object, inv_freq: Sequence[float] | "
          "Sequence[Sequence[float]], rope_factor: float | Sequence[float], softmax_scale: "
          "float, dtype: str, positions: Sequence[int], row: dict[str, object] = {}) -> object"),
      "[positions, query_heads, head_size]: of float32 [heads, tokens, head_size] before "
      "RoPE. `row`: as TraceWriter's.");
}

}  // namespace kvlab::python
