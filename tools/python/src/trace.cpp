#include "tools/python/src/trace.hpp"

#include <fmt/format.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <stdexcept>

#include "sim/access/full_attention.hpp"
#include "sim/access/key_quantization.hpp"
#include "sim/head_view.hpp"
#include "sim/run/run.hpp"
#include "tools/python/src/array.hpp"
#include "tools/python/src/long_call.hpp"
#include "traces/base/json.hpp"
#include "traces/base/parallel.hpp"
#include "traces/selections.hpp"

namespace kvlab::python {
namespace {

Trace open_trace(const std::string& path, bool verify, std::optional<unsigned> threads) {
  return result_of_long([&] {
    return Trace{path, std::make_shared<const TraceReader>(
                           verify ? open_verified_trace(path, threads.value_or(default_threads()))
                                  : TraceReader::open(path))};
  });
}

Part part_of(const std::string& name) {
  if (name == "q") return Part::q;
  if (name == "k") return Part::k;
  if (name == "v") return Part::v;
  throw std::invalid_argument(fmt::format("part '{}': should be q, k or v", name));
}

/// The index in the trace of the layer that has the number `number` in the model.
std::uint32_t layer_at(const TraceReader& trace, std::uint32_t number, std::uint32_t head,
                       std::uint32_t heads) {
  const std::uint32_t layer = trace.shape().layer_of(number);
  if (layer >= trace.shape().layers || head >= heads)
    throw std::invalid_argument(
        fmt::format("layer {}, head {}: the trace {} has {} layers of {} heads", number, head,
                    trace.directory().string(), trace.shape().layers, heads));
  return layer;
}

/// [tokens, head_size] of one head, float32.
FloatArray read_head(const Trace& trace, const std::string& part, std::uint32_t number,
                     std::uint32_t head) {
  const TraceReader& reader = *trace.reader;
  const ModelShape& shape = reader.shape();
  const Part which = part_of(part);
  const std::uint32_t layer =
      layer_at(reader, number, head, which == Part::q ? shape.query_heads : shape.kv_heads);
  std::vector<float> values(std::size_t{reader.tokens()} * shape.head_size);
  {
    const nb::gil_scoped_release no_gil;
    reader.read(which, layer, head, 0, reader.tokens(), values.data());
  }
  return array_of(std::move(values), {reader.tokens(), shape.head_size});
}

FloatArray read_feature(const Trace& trace, const std::string& name, std::uint32_t number,
                        std::uint32_t kv_head) {
  const TraceReader& reader = *trace.reader;
  const std::uint32_t layer = layer_at(reader, number, kv_head, reader.shape().kv_heads);
  if (!reader.has_feature(name))
    throw std::invalid_argument(fmt::format("feature {}: the trace {} has none of that name", name,
                                            reader.directory().string()));
  std::vector<float> values(reader.tokens());
  reader.feature(name, layer, kv_head, values.data());
  return array_of(std::move(values), {reader.tokens()});
}

/// [queries, K]: the selections of one KV head, each ascending and padded with -1.
Array<std::int32_t> read_selections(const Trace& trace, std::uint32_t number,
                                    std::uint32_t kv_head) {
  const TraceReader& reader = *trace.reader;
  const std::uint32_t layer = layer_at(reader, number, kv_head, reader.shape().kv_heads);
  if (!reader.selected_file() || reader.row(layer).window > 0)
    throw std::invalid_argument(
        fmt::format("layer {}: the trace {} has no selections of this layer", number,
                    reader.directory().string()));
  const std::size_t width = reader.max_selected();
  std::vector<std::int32_t> rows;
  {
    const nb::gil_scoped_release no_gil;
    reader.selections(layer, kv_head, [&](std::uint32_t, std::span<const std::uint32_t> tokens) {
      rows.insert(rows.end(), tokens.begin(), tokens.end());
      rows.resize((rows.size() - tokens.size()) + width, kNoToken);
    });
  }
  const std::size_t count = rows.size() / width;
  return array_of(std::move(rows), {count, width});
}

/// [tokens]: a feature that decoders compute, with the given settings.
FloatArray score(const Trace& trace, const std::string& name, std::uint32_t number,
                 std::uint32_t kv_head, std::uint32_t sinks, std::uint32_t lag,
                 std::uint32_t future) {
  const TraceReader& reader = *trace.reader;
  const std::uint32_t layer = layer_at(reader, number, kv_head, reader.shape().kv_heads);
  std::vector<Append> appends;
  for (const auto& [first, tokens, kind] : reader.segments())
    for (std::uint32_t at = 0, one = kind == SegmentKind::prompt ? tokens : 1; at < tokens;
         at += one)
      appends.push_back({.first = first + at, .tokens = one});
  return array_of(result_of_long([&] {
                    const HeadTensors tensors = kvlab::read_head(reader, layer, kv_head);
                    const TokenFeatures all({name}, tensors.view, appends, {sinks, lag, future});
                    return std::vector<float>(all.from(0), all.from(reader.tokens()));
                  }),
                  {reader.tokens()});
}

/// [count, tokens]: attention probabilities of one query head.
FloatArray attention(const Trace& trace, std::uint32_t number, std::uint32_t head,
                     std::uint32_t first, std::optional<std::uint32_t> requested) {
  const TraceReader& reader = *trace.reader;
  const std::uint32_t layer = layer_at(reader, number, head, reader.shape().query_heads);
  const std::uint32_t tokens = reader.tokens();
  const std::uint32_t count = requested.value_or(first < tokens ? tokens - first : 0);
  if (first >= tokens || count == 0 || count > tokens - first)
    throw std::invalid_argument(fmt::format("queries {} to {}: the trace {} has 0 to {}", first,
                                            std::uint64_t{first} + count,
                                            reader.directory().string(), tokens - 1));
  const std::uint32_t group = reader.shape().group();
  std::vector<float> p = result_of_long([&] {
    return FullAttention(reader, layer, head / group, 0).probabilities(head % group, first, count);
  });
  return array_of(std::move(p), {count, tokens});
}

/// Returns two arrays with an entry for each request: the position of the query, and the position
/// of the earlier token that it requests.
std::pair<Array<std::uint32_t>, Array<std::uint32_t>> accesses(
    const Trace& trace, std::uint32_t number, std::uint32_t kv_head,
    std::optional<std::uint32_t> top_k, double threshold,
    const std::vector<std::uint32_t>& queries) {
  const ModelShape& shape = trace.reader->shape();
  const std::uint32_t layer = shape.layer_of(number);
  if (layer == shape.layers || kv_head >= shape.kv_heads)
    throw std::invalid_argument(
        fmt::format("layer {}, KV head {}: the trace {} has {} layers of {} KV heads", number,
                    kv_head, trace.path, shape.layers, shape.kv_heads));
  FullAttention::Accesses found = result_of_long([&] {
    return FullAttention(*trace.reader, layer, kv_head, threshold).accesses({top_k}, queries);
  });
  const std::size_t count = found.queries.size();
  return {array_of(std::move(found.queries), {count}), array_of(std::move(found.tokens), {count})};
}

using SegmentTuple = std::tuple<std::uint32_t, std::uint32_t, std::string>;

std::vector<SegmentTuple> segments_of(const Trace& trace) {
  std::vector<SegmentTuple> segments;
  for (const Segment& segment : trace.reader->segments())
    segments.emplace_back(segment.start, segment.tokens,
                          segment.kind == SegmentKind::prompt ? "prompt" : "decode");
  return segments;
}

std::string model_json(const Trace& trace) {
  const TraceHeader& header = trace.reader->header();
  return json_text(nlohmann::json{{"model", header.model},
                                  {"rope", *header.rope_config},
                                  {"rope_factor", trace.reader->row(0).rope.factor},
                                  {"softmax_scale", trace.reader->row(0).scale},
                                  {"weights_xxh3", header.weights_xxh3},
                                  {"tokenizer_xxh3", header.tokenizer_xxh3},
                                  {"capture", *header.capture}});
}

std::vector<std::uint32_t> layer_numbers(const Trace& trace) {
  std::vector<std::uint32_t> numbers;
  for (std::uint32_t l = 0; l < trace.reader->shape().layers; ++l)
    numbers.push_back(trace.reader->shape().number(l));
  return numbers;
}

/// How each layer attends, as TraceWriter takes it.
nb::typed<nb::list, nb::dict> rows_of(const Trace& trace) {
  nb::list rows;
  for (std::uint32_t l = 0; l < trace.reader->shape().layers; ++l) {
    const RowSpec& row = trace.reader->row(l);
    nb::dict said;
    said["span"] = row.window;
    said["softcap"] = row.softcap;
    said["rope"] = row.table;
    said["scale"] = row.scale;
    said["sink"] = row.sinks.empty() ? nb::object(nb::none()) : nb::cast(row.sinks);
    rows.append(said);
  }
  return rows;
}

FloatArray frequencies(const Trace& trace) {
  const TraceHeader& header = trace.reader->header();
  if (header.rows.empty())
    return array_of(std::vector<float>(header.rope.inv_freq), {header.rope.inv_freq.size()});
  std::map<std::uint32_t, std::vector<float>> tables;
  for (const RowSpec& row : header.rows) tables[row.table] = row.rope.inv_freq;
  std::vector<float> all;
  for (const auto& [table, inv_freq] : tables)
    all.insert(all.end(), inv_freq.begin(), inv_freq.end());
  return array_of(std::move(all), {tables.size(), tables.at(0).size()});
}

std::vector<std::string> shard_files(const Trace& trace) {
  std::vector<std::string> files;
  for (const ShardInfo& shard : trace.reader->shards())
    files.push_back((trace.reader->directory() / shard.file).string());
  return files;
}

}  // namespace

void bind_trace(nb::module_& module) {
  nb::class_<Trace>(module, "Trace", "A finished trace, mapped into memory.")
      .def_static("open", open_trace, nb::arg("path"), nb::arg("verify"), nb::arg("threads").none(),
                  "Opens the directory of a trace, and verifies it if `verify` is true.")
      .def_ro("path", &Trace::path)
      .def_prop_ro("name", [](const Trace& t) { return describe(*t.reader, t.path).name; })
      .def_prop_ro("hash", [](const Trace& t) { return t.reader->hash(); })
      .def_prop_ro("tokens", [](const Trace& t) { return t.reader->tokens(); })
      .def_prop_ro("prompt_tokens", [](const Trace& t) { return t.reader->prompt_tokens(); })
      .def_prop_ro("layers", [](const Trace& t) { return t.reader->shape().layers; })
      .def_prop_ro("query_heads", [](const Trace& t) { return t.reader->shape().query_heads; })
      .def_prop_ro("kv_heads", [](const Trace& t) { return t.reader->shape().kv_heads; })
      .def_prop_ro("head_size", [](const Trace& t) { return t.reader->shape().head_size; })
      .def_prop_ro("dtype",
                   [](const Trace& t) { return std::string(torch_name(t.reader->shape().dtype)); })
      .def_prop_ro("segments", segments_of, "(start, tokens, kind) of each.")
      .def_prop_ro(
          "ids",
          [](const Trace& t) {
            return array_of(std::vector<std::int32_t>(t.reader->ids()), {t.reader->tokens()});
          },
          nb::rv_policy::automatic)
      .def_prop_ro("inv_freq", frequencies, nb::rv_policy::automatic,
                   "[n], or [tables, n] where layers differ.")
      .def_prop_ro("layer_numbers", layer_numbers, "The model's number of each layer in the trace.")
      .def_prop_ro("rows", rows_of, nb::sig("def rows(self) -> list[dict[str, object]]"),
                   "For each layer: its window, soft cap, RoPE, scale and sinks.")
      .def_prop_ro("model_json", model_json, "The manifest's description of the model, as JSON.")
      .def_prop_ro("shard_files", shard_files)
      .def_prop_ro("features",
                   [](const Trace& t) {
                     std::vector<std::string> names;
                     for (const auto& feature : t.reader->extras().features)
                       names.push_back(feature.name);
                     return names;
                   })
      .def_prop_ro(
          "key_quantization_warning",
          [](const Trace& t) { return key_quantization_warning(*t.reader); },
          "A warning that names the layers in which 4-bit keys are unsafe; empty if there are "
          "none.")
      .def_prop_ro("has_gradients",
                   [](const Trace& t) { return t.reader->extras().gradients.has_value(); })
      .def("read", read_head, nb::arg("part"), nb::arg("layer"), nb::arg("head"),
           "[tokens, head_size] of one head of q, k or v before RoPE, widened to float32.")
      .def("feature", read_feature, nb::arg("name"), nb::arg("layer"), nb::arg("kv_head"),
           "[tokens]: a feature that is stored in the trace.")
      .def("selected", read_selections, nb::arg("layer"), nb::arg("kv_head"),
           "[queries, K]: the selections that are stored in the trace, int32.")
      .def("score", score, nb::arg("name"), nb::arg("layer"), nb::arg("kv_head"), nb::arg("sinks"),
           nb::arg("lag"), nb::arg("future"), "[tokens]: a feature that decoders compute.")
      .def("attention", attention, nb::arg("layer"), nb::arg("head"), nb::arg("first"),
           nb::arg("count").none(), "[count, tokens]: probabilities of one query head.")
      .def("accesses", accesses, nb::arg("layer"), nb::arg("kv_head"), nb::arg("top_k").none(),
           nb::arg("threshold"), nb::arg("queries"),
           "For each request, the position of the query and that of the requested token.");
}

}  // namespace kvlab::python
