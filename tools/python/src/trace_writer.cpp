// Writes traces while a model computes them, and adds data to finished traces.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <stdexcept>

#include "engine/capture.hpp"
#include "engine/checkpoint/checkpoint.hpp"
#include "engine/checkpoint/model.hpp"
#include "policies/features/features.hpp"
#include "tools/python/src/bindings.hpp"
#include "tools/python/src/rows.hpp"
#include "tools/python/src/trace.hpp"
#include "traces/base/json.hpp"
#include "traces/base/text.hpp"
#include "traces/extras.hpp"
#include "traces/manifest.hpp"
#include "traces/selections.hpp"
#include "traces/shard.hpp"

namespace kvlab::python {
namespace {

using Rows = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Selected = nb::ndarray<const std::int32_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

std::span<const float> span(const Rows& rows) { return {rows.data(), rows.size()}; }

/// A trace writer for Python. close() destroys the C++ writer in it, because a Python stack frame
/// may keep this object alive for longer.
struct Writer {
  std::optional<TraceWriter> held;

  TraceWriter& operator*() {
    if (!held) throw std::logic_error("the writer of a trace is closed");
    return *held;
  }
};

}  // namespace

std::vector<Rope> ropes_of(const Tables& inv_freq, const Factors& factors) {
  std::vector<Rope> ropes;
  if (const auto* const one = std::get_if<std::vector<float>>(&inv_freq))
    ropes.push_back({*one});
  else
    for (const auto& table : std::get<1>(inv_freq)) ropes.push_back({table});
  const auto* const each = std::get_if<std::vector<float>>(&factors);
  if (ropes.empty() || (each && each->size() != ropes.size()))
    throw std::invalid_argument(
        fmt::format("{} rope factors are given; give one for each of {} tables",
                    each ? each->size() : 1, ropes.size()));
  for (std::size_t i = 0; i < ropes.size(); ++i)
    ropes[i].factor = each ? (*each)[i] : std::get<float>(factors);
  return ropes;
}

RowSpec row_of(const nb::dict& said, const std::vector<Rope>& ropes, float softmax_scale) {
  RowSpec row{.scale = softmax_scale};
  for (const auto [key, value] : said) {
    const auto name = nb::cast<std::string>(key);
    if (name == "span")
      row.window = nb::cast<std::uint32_t>(value);
    else if (name == "softcap")
      row.softcap = nb::cast<float>(value);
    else if (name == "rope")
      row.table = nb::cast<std::uint32_t>(value);
    else if (name == "scale")
      row.scale = nb::cast<float>(value);
    else if (name == "sink" && !value.is_none())
      row.sinks = nb::cast<std::vector<float>>(value);
    else if (name != "sink")
      throw std::invalid_argument(
          fmt::format("rows: {} is not a known key; known are span, softcap, rope, scale and sink",
                      json_quoted(name)));
  }
  if (row.table >= ropes.size())
    throw std::invalid_argument(
        fmt::format("rows: rope {} does not exist; there are {} tables, numbered from 0", row.table,
                    ropes.size()));
  row.rope = ropes[row.table];
  return row;
}

namespace {

void make_writer(Writer* at, const std::string& directory, const std::string& header_json,
                 const Tables& inv_freq, const Factors& rope_factor, float softmax_scale,
                 const std::optional<std::vector<nb::dict>>& rows,
                 std::vector<std::uint32_t> layer_numbers) {
  TraceHeader header = parse_header(header_json);
  const std::vector<Rope> ropes = ropes_of(inv_freq, rope_factor);
  header.rope = ropes.front();
  header.softmax_scale = softmax_scale;
  header.shape.numbers = std::move(layer_numbers);
  if (rows)
    for (const nb::dict& said : *rows) header.rows.push_back(row_of(said, ropes, softmax_scale));
  new (at) Writer{TraceWriter(directory, std::move(header))};
}

/// Computes the sketch layer by layer, so that only one layer has to be in float32.
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

void add_feature(const Trace& trace, const std::string& name, const std::vector<Rows>& layers) {
  const ModelShape& shape = trace.reader->shape();
  const std::size_t tokens = trace.reader->tokens();
  for (std::size_t layer = 0; layer < layers.size(); ++layer) {
    const Rows& rows = layers[layer];
    const std::vector<std::size_t> found(rows.shape_ptr(), rows.shape_ptr() + rows.ndim());
    if (found != std::vector<std::size_t>{shape.kv_heads, tokens})
      throw std::invalid_argument(fmt::format("layer {} has shape [{}]; it should be [{}, {}]",
                                              layer, fmt::join(found, ", "), shape.kv_heads,
                                              tokens));
  }
  if (layers.size() != shape.layers)
    throw std::invalid_argument(
        fmt::format("{} layers are given, but the trace has {}", layers.size(), shape.layers));
  const nb::gil_scoped_release no_gil;
  write_feature(trace.reader->directory(), name,
                [&](std::uint32_t layer, std::uint32_t head, std::uint32_t token) {
                  return layers[layer].data()[head * tokens + token];
                });
}

/// The selections [kv_heads, queries, K] of each layer. Throws std::invalid_argument unless they
/// have the shape that the trace needs. The writers check the values.
SelectionsToWrite selections_of(const std::string& queries, const std::vector<Selected>& layers,
                                const ModelShape& shape, const std::vector<Segment>& segments) {
  SelectionsToWrite selections{parse_queries(queries), 0, {}};
  const std::size_t count = query_positions(segments, selections.queries).size();
  for (std::size_t layer = 0; layer < layers.size(); ++layer) {
    const Selected& rows = layers[layer];
    if (rows.shape(0) != shape.kv_heads || rows.shape(1) != count ||
        rows.shape(2) != layers.front().shape(2))
      throw std::invalid_argument(fmt::format(
          "selected: layer {} is [{}, {}, {}]; [{} KV heads, {} {} queries, {}] is expected", layer,
          rows.shape(0), rows.shape(1), rows.shape(2), shape.kv_heads, count, queries,
          layers.front().shape(2)));
    selections.layers.emplace_back(rows.data(), rows.size());
  }
  if (!layers.empty())
    selections.tokens =
        static_cast<std::uint32_t>(std::min<std::size_t>(layers.front().shape(2), UINT32_MAX));
  return selections;
}

void add_selections(const Trace& trace, const std::string& queries,
                    const std::vector<Selected>& layers) {
  const SelectionsToWrite selections =
      selections_of(queries, layers, trace.reader->shape(), trace.reader->segments());
  const nb::gil_scoped_release no_gil;
  write_selections(trace.reader->directory(), selections);
}

/// `segments`: tokens, and whether they are a prompt.
void write_selected_trace(const std::string& directory, const std::string& header_json,
                          const std::vector<std::uint32_t>& layer_numbers,
                          const std::vector<std::int32_t>& ids,
                          const std::vector<std::pair<std::uint32_t, bool>>& segments,
                          const std::string& queries, const std::vector<Selected>& layers) {
  TraceHeader header = parse_header(header_json);
  header.softmax_scale = 1;  // any value, because nothing attends
  header.shape.numbers = layer_numbers;
  std::vector<Segment> all;
  std::uint32_t start = 0;
  for (const auto& [tokens, prompt] : segments) {
    all.push_back({start, tokens, prompt ? SegmentKind::prompt : SegmentKind::decode});
    start += tokens;
  }
  const SelectionsToWrite selections = selections_of(queries, layers, header.shape, all);
  const nb::gil_scoped_release no_gil;
  write_selections_trace(directory, std::move(header), ids, all, selections);
}

/// `all`: [layers, samples, tokens, query_heads, head_size].
void add_gradients(const Trace& trace, std::uint32_t gradient_samples, std::uint64_t seed,
                   const std::string& queries, const std::vector<float>& scales, const Rows& all) {
  const ModelShape& shape = trace.reader->shape();
  const std::size_t size = shape.head_size, token = shape.query_heads * size,
                    sample_size = token * trace.reader->tokens(),
                    layer_size = gradient_samples * sample_size;
  if (all.size() != shape.layers * layer_size || scales.size() != trace.reader->shards().size())
    throw std::invalid_argument("gradients: the shape does not match the trace");
  const nb::gil_scoped_release no_gil;
  write_gradients(
      trace.reader->directory(), {gradient_samples, seed, parse_queries(queries), {}},
      [&](std::size_t file) { return scales[file]; },
      [&](const ShardInfo& shard, std::uint32_t layer, std::span<float> values) {
        const float scale = scales[shard.first / kShardTokens];
        float* to = values.data();
        for (std::size_t d = 0; d < gradient_samples; ++d)
          for (std::size_t head = 0; head < shape.query_heads; ++head)
            for (std::size_t t = shard.first; t < shard.first + shard.tokens; ++t) {
              const float* from = all.data() + layer * layer_size + d * sample_size + t * token;
              to = std::transform(from + head * size, from + (head + 1) * size, to,
                                  [&](float x) { return x / scale; });
            }
      });
}

}  // namespace

void bind_trace_writer(nb::module_& module) {
  using no_gil = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Writer>(module, "TraceWriter", "TraceWriter of traces/trace.hpp.")
      .def("__init__", make_writer, nb::arg("directory"), nb::arg("header"), nb::arg("inv_freq"),
           nb::arg("rope_factor"), nb::arg("softmax_scale"), nb::arg("rows") = nb::none(),
           nb::arg("layer_numbers") = std::vector<std::uint32_t>(),
           nb::sig("def __init__(self, directory: str, header: str, inv_freq: Sequence[float] | "
                   "Sequence[Sequence[float]], rope_factor: float | Sequence[float], "
                   "softmax_scale: float, rows: Sequence[dict[str, object]] | None = None, "
                   "layer_numbers: Sequence[int] = ()) -> None"),
           "`header`: JSON of the manifest's keys that describe a trace. `rows`: for each layer, "
           "the optional keys span, softcap, rope, scale and sink; `rope` is an index in "
           "`inv_freq`. `layer_numbers`: the model's numbers of the layers that are present.")
      .def("sketch", sketch, nb::arg("weights"),
           nb::sig("def sketch(self, weights: object) -> None"),
           "`weights`: the output projection of each layer, float32 [hidden, inputs].")
      .def(
          "begin",
          [](Writer& w, const std::vector<std::int32_t>& ids, bool prompt, bool new_segment) {
            (*w).begin(ids, prompt ? SegmentKind::prompt : SegmentKind::decode, new_segment);
          },
          nb::arg("ids"), nb::arg("prompt"), nb::arg("new_segment") = false)
      .def(
          "layer",
          [](Writer& w, std::uint32_t layer, const Rows& q, const Rows& k, const Rows& v,
             const Rows& out) { (*w).layer(layer, span(q), span(k), span(v), span(out), {}); },
          "`layer`: the index of the layer among those in the trace.", nb::arg("layer"),
          nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("out"),
          nb::sig(
              "def layer(self, layer: int, q: object, k: object, v: object, out: object) -> None"))
      .def(
          "residual",
          [](Writer& w, std::uint32_t layer, const Rows& norm2) {
            (*w).residual(layer, span(norm2));
          },
          nb::sig("def residual(self, layer: int, norm2: object) -> None"))
      .def(
          "end", [](Writer& w) { (*w).end(); }, no_gil())
      .def(
          "finish", [](Writer& w) { (*w).finish(); }, no_gil())
      .def(
          "close", [](Writer& w) { w.held.reset(); },
          "Ends the writing without finishing the trace. Complete shards stay.")
      .def_prop_ro("tokens", [](Writer& w) { return (*w).tokens(); });
  module.def("add_feature", add_feature, nb::arg("trace"), nb::arg("name"), nb::arg("layers"),
             nb::sig("def add_feature(trace: Trace, name: str, layers: Sequence[object]) -> None"),
             "Adds or replaces a feature: float32 [kv_heads, tokens] of each layer.");
  module.def("add_gradients", add_gradients, nb::arg("trace"), nb::arg("draws"), nb::arg("seed"),
             nb::arg("queries"), nb::arg("scales"), nb::arg("gradients"),
             nb::sig("def add_gradients(trace: Trace, draws: int, seed: int, queries: str, scales: "
                     "Sequence[float], gradients: object) -> None"),
             "Adds or replaces gradients: float32 [layers, draws, tokens, query_heads, head_size]. "
             "`scales`: for each file, the number by which its gradients are divided.");
  module.def("add_selections", add_selections, nb::arg("trace"), nb::arg("queries"),
             nb::arg("layers"),
             nb::sig("def add_selections(trace: Trace, queries: str, layers: Sequence[object]) -> "
                     "None"),
             "Adds or replaces selections: int32 [kv_heads, queries, K] of each layer without a "
             "sliding window.");
  module.def("write_selections", write_selected_trace, nb::arg("directory"), nb::arg("header"),
             nb::arg("layer_numbers"), nb::arg("ids"), nb::arg("segments"), nb::arg("queries"),
             nb::arg("layers"),
             nb::sig("def write_selections(directory: str, header: str, layer_numbers: "
                     "Sequence[int], ids: Sequence[int], segments: Sequence[tuple[int, bool]], "
                     "queries: str, layers: Sequence[object]) -> None"),
             "Writes a trace that has only selections. `header` and `layer_numbers`: as in "
             "TraceWriter. `segments`: tokens, and whether they are a prompt.");
  module.attr("shard_tokens") = kShardTokens;
  module.def("check_grid", [] { return std::vector(kCheckGrid.begin(), kCheckGrid.end()); });
  module.def("built_in_features", built_in_features);
  module.def("supported_architectures", supported_architectures,
             "(architecture, model_type) of each supported architecture.");
  module.def("weights_xxh3",
             [](const std::string& folder) { return Checkpoint::open(folder).xxh3(); });
  module.def("tokenizer_xxh3", [](const std::string& folder) { return tokenizer_xxh3(folder); });
  module.def("without_controls", [](const std::string& text) { return without_controls(text); });
}

}  // namespace kvlab::python
