// Traces from arrays.
#include <fmt/format.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "sim/array_trace.hpp"
#include "tools/python/src/bindings.hpp"
#include "tools/python/src/long_call.hpp"
#include "traces/base/json.hpp"

namespace kvlab::python {
namespace {

using Tensor = nb::ndarray<nb::ro, nb::device::cpu>;

Dtype dtype_of(const Tensor& tensor, std::string_view name) {
  const auto dtype = tensor.dtype();
  if (dtype == nb::dtype<float>()) return Dtype::f32;
  const bool two_bytes = dtype.bits == 16 && dtype.lanes == 1;
  if (two_bytes && dtype.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Float))
    return Dtype::f16;
  if (two_bytes && dtype.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Bfloat))
    return Dtype::bf16;
  throw std::invalid_argument(fmt::format(
      "{}: {} bits an element; float32, float16 or bfloat16 is expected", name, dtype.bits));
}

StridedTensor view_of(const Tensor& tensor, std::string_view name) {
  if (tensor.ndim() != 4)
    throw std::invalid_argument(
        fmt::format("{}: has {} dimensions; [layers, heads, tokens, head_size] is expected", name,
                    tensor.ndim()));
  StridedTensor view{static_cast<const std::byte*>(tensor.data()), dtype_of(tensor, name), {}};
  for (std::size_t i = 0; i < 4; ++i) view.strides[i] = tensor.stride(i);
  return view;
}

std::string shape_text(const Tensor& t) {
  return fmt::format("[{}, {}, {}, {}]", t.shape(0), t.shape(1), t.shape(2), t.shape(3));
}

/// Throws unless `b` has the shape of `a`, but for the heads where `heads` may differ.
void check_alike(const Tensor& a, std::string_view a_name, const Tensor& b, std::string_view b_name,
                 bool heads_differ) {
  bool alike = a.dtype() == b.dtype();
  for (std::size_t i = 0; i < 4; ++i)
    alike = alike && ((i == 1 && heads_differ) || a.shape(i) == b.shape(i));
  if (!alike)
    throw std::invalid_argument(fmt::format(
        "{}: {} does not go with {} {}; one dtype, and the same layers, {}tokens and head size are "
        "expected",
        b_name, shape_text(b), a_name, shape_text(a), heads_differ ? "" : "heads, "));
}

TraceHeader header_of(const Tensor& q, const Tensor& k, const std::string& model,
                      const std::vector<float>& inv_freq, float rope_factor, float softmax_scale,
                      bool rounds) {
  TraceHeader header;
  header.model = model;
  header.shape = {static_cast<std::uint32_t>(q.shape(0)), static_cast<std::uint32_t>(q.shape(1)),
                  static_cast<std::uint32_t>(k.shape(1)), static_cast<std::uint32_t>(q.shape(3)),
                  dtype_of(q, "q")};
  header.rope = {inv_freq, rope_factor};
  header.softmax_scale = softmax_scale;
  header.rounding = rounds ? Rounding::model_dtype : Rounding::none;
  header.capture = nlohmann::json{{"engine", "arrays"},
                                  {"version", KVLAB_VERSION},
                                  {"device", "cpu"},
                                  {"options", nlohmann::json::object()}};
  return header;
}

void write_trace(const std::string& directory, const Tensor& q, const Tensor& k, const Tensor& v,
                 const std::vector<std::int32_t>& ids, std::uint32_t prompt_tokens,
                 const std::string& model, const std::vector<float>& inv_freq, float rope_factor,
                 float softmax_scale, bool rounds) {
  const SequenceTensors tensors{view_of(q, "q"), view_of(k, "k"), view_of(v, "v"), ids,
                                prompt_tokens};
  check_alike(q, "q", k, "k", true);
  check_alike(k, "k", v, "v", false);
  if (ids.size() != q.shape(2) || ids.empty())
    throw std::invalid_argument(
        fmt::format("ids: {} for {} tokens; one for each is expected", ids.size(), q.shape(2)));
  if (prompt_tokens < 1 || prompt_tokens > ids.size())
    throw std::invalid_argument(
        fmt::format("prompt_tokens: {} should be between 1 and {}", prompt_tokens, ids.size()));
  const TraceHeader header = header_of(q, k, model, inv_freq, rope_factor, softmax_scale, rounds);
  call_long([&] { write_array_trace(directory, header, tensors); });
}

}  // namespace

void bind_arrays(nb::module_& module) {
  module.def("write_trace", write_trace, nb::arg("directory"), nb::arg("q"), nb::arg("k"),
             nb::arg("v"), nb::arg("ids"), nb::arg("prompt_tokens"), nb::arg("model"),
             nb::arg("inv_freq"), nb::arg("rope_factor"), nb::arg("softmax_scale"),
             nb::arg("rounds"),
             nb::sig("def write_trace(directory: str, q: object, k: object, v: object, ids: "
                     "Sequence[int], prompt_tokens: int, model: str, inv_freq: Sequence[float], "
                     "rope_factor: float, softmax_scale: float, rounds: bool) -> None"),
             "Writes a trace of q, k, v [layers, heads, tokens, head_size] before RoPE.");
}

}  // namespace kvlab::python
