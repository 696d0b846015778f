// Traces as a model computes them, and what a finished one is given.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>
#include <stdexcept>

#include "engine/checkpoint/checkpoint.hpp"
#include "engine/checkpoint/model.hpp"
#include "engine/output_sketch.hpp"
#include "policies/columns/columns.hpp"
#include "tools/python/src/bindings.hpp"
#include "tools/python/src/trace.hpp"
#include "traces/base/text.hpp"
#include "traces/extras_writer.hpp"
#include "traces/manifest.hpp"

namespace kvlab::python {
namespace {

using Rows = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

std::span<const float> values(const Rows& rows) { return {rows.data(), rows.size()}; }

/// A TraceWriter or GradientWriter, whose files close() takes care of: Python frames may hold it
/// longer.
template <class Held>
struct Closable {
  std::optional<Held> held;

  Held& operator*() {
    if (!held) throw std::logic_error("the writer of a trace is closed");
    return *held;
  }
};
using Writer = Closable<TraceWriter>;
using Gradients = Closable<GradientWriter>;

void make_writer(Writer* at, const std::string& directory, const std::string& header_json,
                 std::vector<float> inv_freq, float rope_factor, float softmax_scale) {
  TraceHeader header = parse_header(header_json);
  header.rope = {std::move(inv_freq), rope_factor};
  header.softmax_scale = softmax_scale;
  new (at) Writer{TraceWriter(directory, std::move(header))};
}

/// A layer at a time, so that no more than one need be there in float32.
void sketch(Writer& writer, const nb::iterable& weights) {
  OutputSketch sketch{kSketchSeed, {}};
  std::size_t layer = 0;
  for (const nb::handle one : weights) {
    const auto weight = nb::cast<Matrix>(one);
    const std::size_t hidden = weight.shape(0), inputs = weight.shape(1),
                      first = sketch.values.size();
    sketch.values.resize(first + inputs * kSketchColumns);
    const nb::gil_scoped_release no_gil;
    add_layer_sketch(
        sketch.seed, layer++, hidden,
        [&](std::size_t output, float* row) {
          std::memcpy(row, weight.data() + output * inputs, inputs * sizeof(float));
        },
        std::span(sketch.values).subspan(first));
  }
  (*writer).sketch(sketch);
}

void add_column(const Trace& trace, const std::string& name, const std::vector<Rows>& layers) {
  const ModelShape& shape = trace.reader->shape();
  const std::size_t tokens = trace.reader->tokens();
  for (std::size_t layer = 0; layer < layers.size(); ++layer) {
    const Rows& rows = layers[layer];
    const std::vector<std::size_t> found(rows.shape_ptr(), rows.shape_ptr() + rows.ndim());
    if (found != std::vector<std::size_t>{shape.kv_heads, tokens})
      throw std::invalid_argument(fmt::format("column {}: layer {} is [{}]; [{}, {}] is expected",
                                              name, layer, fmt::join(found, ", "), shape.kv_heads,
                                              tokens));
  }
  if (layers.size() != shape.layers)
    throw std::invalid_argument(
        fmt::format("column {}: {} layers; {} are expected", name, layers.size(), shape.layers));
  const nb::gil_scoped_release no_gil;
  write_column(trace.reader->directory(), name,
               [&](std::uint32_t layer, std::uint32_t head, std::uint32_t token) {
                 return layers[layer].data()[head * tokens + token];
               });
}

void bind_writer(nb::module_& module) {
  using no_gil = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Writer>(module, "TraceWriter", "Writes a trace as a model computes it.")
      .def("__init__", make_writer, nb::arg("directory"), nb::arg("header"), nb::arg("inv_freq"),
           nb::arg("rope_factor"), nb::arg("softmax_scale"),
           "`header`: JSON of the manifest's keys that describe a trace.")
      .def("sketch", sketch, nb::arg("weights"),
           nb::sig("def sketch(self, weights: Iterable[Any]) -> None"),
           "Before the first tokens: float32 [hidden, inputs] of each output projection.")
      .def(
          "begin",
          [](Writer& w, const std::vector<std::int32_t>& ids, bool prompt) {
            (*w).begin(ids, prompt ? SegmentKind::prompt : SegmentKind::decode);
          },
          nb::arg("ids"), nb::arg("prompt"), "Announces the next tokens.")
      .def(
          "layer",
          [](Writer& w, std::uint32_t index, const Rows& q, const Rows& k, const Rows& v,
             const Rows& out) {
            (*w).layer(index, values(q), values(k), values(v), values(out), {});
          },
          nb::arg("index"), nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("out"),
          nb::sig("def layer(self, index: int, q: Any, k: Any, v: Any, out: Any) -> None"),
          "Of the announced tokens: float32 [tokens, heads, head_size] before RoPE, and "
          "attention's "
          "outputs.")
      .def(
          "residual",
          [](Writer& w, std::uint32_t index, const Rows& norm2) {
            (*w).residual(index, values(norm2));
          },
          nb::arg("index"), nb::arg("norm2"),
          nb::sig("def residual(self, index: int, norm2: Any) -> None"),
          "Squared norms [tokens] of the residual stream behind the layer's attention.")
      .def(
          "end", [](Writer& w) { (*w).end(); }, no_gil(), "All layers have come.")
      .def(
          "finish", [](Writer& w) { (*w).finish(); }, no_gil(), "Writes the manifest.")
      .def(
          "close", [](Writer& w) { w.held.reset(); },
          "Unfinished: whole shards are left, or nothing.")
      .def_prop_ro("tokens", [](Writer& w) { return (*w).tokens(); });
}

void bind_extras(nb::module_& module) {
  nb::class_<Gradients>(module, "GradientWriter", "Gradients of a finished trace.")
      .def(
          "__init__",
          [](Gradients* at, const Trace& trace, std::uint32_t draws, std::uint64_t seed,
             const std::string& span) {
            new (at) Gradients();
            at->held.emplace(trace.reader->directory(), draws, seed, parse_span(span));
          },
          nb::arg("trace"), nb::arg("draws"), nb::arg("seed"), nb::arg("span"))
      .def(
          "put",
          [](Gradients& g, std::uint32_t layer, const Rows& gradient) {
            (*g).put(layer, values(gradient));
          },
          nb::arg("layer"), nb::arg("gradient"),
          nb::sig("def put(self, layer: int, gradient: Any) -> None"),
          "Of a layer: float32 [draws, tokens, query_heads, head_size].")
      .def(
          "finish", [](Gradients& g) { (*g).finish(); }, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "close", [](Gradients& g) { g.held.reset(); }, "Unfinished: nothing is left.");
  module.def("add_column", add_column, nb::arg("trace"), nb::arg("name"), nb::arg("layers"),
             nb::sig("def add_column(trace: Trace, name: str, layers: Sequence[Any]) -> None"),
             "Adds or replaces a column: float32 [kv_heads, tokens] of each layer.");
}

}  // namespace

void bind_trace_writer(nb::module_& module) {
  bind_writer(module);
  bind_extras(module);
  module.attr("shard_tokens") = kShardTokens;
  module.def("built_in_columns", built_in_columns,
             "Columns that are computed from keys and values.");
  module.def("supported_architectures", supported_architectures,
             "(architecture, model_type) of each that the engine runs.");
  module.def(
      "weights_xxh3", [](const std::string& folder) { return Checkpoint::open(folder).xxh3(); },
      nb::arg("folder"), nb::call_guard<nb::gil_scoped_release>(),
      "The checksum of a checkpoint's weights.");
  module.def(
      "tokenizer_xxh3", [](const std::string& folder) { return tokenizer_xxh3(folder); },
      nb::arg("folder"), "That of its tokenizer.json; empty if there is none.");
  module.def(
      "without_controls", [](const std::string& text) { return without_controls(text); },
      nb::arg("text"), "With a space for each control character.");
}

}  // namespace kvlab::python
