#include <fmt/format.h>

#include <algorithm>

#include "sim/access/key_quantization.hpp"
#include "tools/command.hpp"
#include "tools/options.hpp"
#include "traces/base/json.hpp"
#include "traces/trace.hpp"

namespace kvlab {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kUsage = "kvlab trace info|verify|seal TRACE";

struct Request {
  std::vector<std::string> words;  ///< the action and the directory of the trace
  unsigned threads = 1;
  bool json = false;
};

void check(Request& request, const GivenOptions& given) {
  if (request.words.size() != 2)
    throw std::invalid_argument(fmt::format("give an action and one trace: {}", kUsage));
  if (request.words[0] != "verify") given.refuse({"threads"}, "is for `kvlab trace verify` only");
}

void add_options(OptionTable& table, Request& request) {
  table.texts("action", "info|verify|seal", Takes::one_word, request.words,
              "what to do, then the directory of the trace; the word `--action` may be left out");
  add_threads_option(table, request.threads);
  add_json_option(table, request.json);
}

std::string shards_text(const TraceReader& trace) {
  const std::size_t count = trace.shards().size();
  return fmt::format("{} shard{}", count, count == 1 ? "" : "s");
}

std::uint64_t file_bytes(const TraceReader& trace) {
  std::uint64_t bytes = trace.tokens_file().bytes().size();
  for (std::size_t i = 0; i < trace.shards().size(); ++i)
    bytes += trace.shard_file(i).bytes().size();
  for (const SafetensorsFile& file : trace.gradient_files()) bytes += file.bytes().size();
  for (const SafetensorsFile& file : trace.feature_files()) bytes += file.bytes().size();
  if (trace.sketch_file()) bytes += trace.sketch_file()->bytes().size();
  if (trace.selected_file()) bytes += trace.selected_file()->bytes().size();
  return bytes;
}

/// The object `extras` of the trace's manifest, without the names of its files.
Json extras_json(const TraceReader& trace) {
  Json extras = Json::object();
  if (trace.extras().residual_norm2) extras["residual_norm2"] = Json::object();
  if (const auto& sketch = trace.extras().sketch) extras["sketch"] = {{"seed", sketch->seed}};
  if (const auto& gradients = trace.extras().gradients)
    extras["grad"] = {{"draws", gradients->gradient_samples},
                      {"seed", gradients->seed},
                      {"queries", name_of(gradients->queries)}};
  for (const auto& feature : trace.extras().features) extras["features"].push_back(feature.name);
  if (const auto& selections = trace.extras().selections)
    extras["selected"] = {{"tokens", trace.max_selected()},
                          {"queries", name_of(selections->queries)}};
  return extras;
}

std::string extras_text(const TraceReader& trace) {
  std::vector<std::string> parts;
  if (trace.extras().residual_norm2) parts.emplace_back("residual norms");
  if (trace.sketch_file()) parts.emplace_back("sketch of the output projections");
  if (const auto& gradients = trace.extras().gradients)
    parts.push_back(fmt::format("gradients of {} gradient samples over {} queries",
                                gradients->gradient_samples, name_of(gradients->queries)));
  for (const auto& feature : trace.extras().features) parts.push_back("feature " + feature.name);
  if (const auto& selections = trace.extras().selections)
    parts.push_back(fmt::format("selections of up to {} tokens at {} queries", trace.max_selected(),
                                name_of(selections->queries)));
  return parts.empty() ? "none" : fmt::format("{}", fmt::join(parts, ", "));
}

std::string passages_text(const TraceReader& trace) {
  std::vector<std::string> parts;
  for (const Passage& passage : trace.header().passages)
    parts.push_back(fmt::format("{} ({} from {} on)", passage.name, passage.tokens, passage.start));
  return parts.empty() ? "none" : fmt::format("{}", fmt::join(parts, ", "));
}

/// How each layer attends (window, softcap, RoPE, scale, sinks). Empty for traces that do not store
/// this by layer.
Json rows_json(const TraceReader& trace) {
  Json rows = Json::array();
  for (const RowSpec& row : trace.header().rows)
    rows.push_back({{"layer", trace.shape().number(static_cast<std::uint32_t>(rows.size()))},
                    {"window", row.window},
                    {"softcap", row.softcap},
                    {"rope", row.table},
                    {"scale", row.scale},
                    {"sinks", !row.sinks.empty()}});
  return rows;
}

/// Says how many layers have each property.
std::string rows_text(const std::vector<RowSpec>& rows) {
  const auto count = [&](auto is) { return std::ranges::count_if(rows, is); };
  return fmt::format("{} of {} layers with a window, {} capped, {} with sinks",
                     count([](const RowSpec& r) { return r.window > 0; }), rows.size(),
                     count([](const RowSpec& r) { return r.softcap > 0; }),
                     count([](const RowSpec& r) { return !r.sinks.empty(); }));
}

Json info_json(const TraceReader& trace) {
  const TraceHeader& header = trace.header();
  const ModelShape& shape = header.shape;
  Json segments = Json::array();
  for (const Segment& segment : trace.segments())
    segments.push_back(
        {{"start", segment.start}, {"tokens", segment.tokens}, {"kind", name_of(segment.kind)}});
  Json passages = Json::array();
  for (const Passage& passage : header.passages)
    passages.push_back(
        {{"name", passage.name}, {"start", passage.start}, {"tokens", passage.tokens}});
  return {{"trace", trace.directory().string()},
          {"format", header.format()},
          {"hash", trace.hash()},
          {"model", header.model},
          {"layers", shape.layers},
          {"query_heads", shape.query_heads},
          {"kv_heads", shape.kv_heads},
          {"head_size", shape.head_size},
          {"dtype", torch_name(shape.dtype)},
          {"rope", Json(*header.rope_config)},
          {"softmax_scale", trace.row(0).scale},
          {"rows", rows_json(trace)},
          {"rounding", name_of(header.rounding)},
          {"tokens", trace.tokens()},
          {"prompt_tokens", trace.prompt_tokens()},
          {"segments", std::move(segments)},
          {"shards", trace.shards().size()},
          {"bytes", file_bytes(trace)},
          {"extras", extras_json(trace)},
          {"key_quantization_errors", key_quantization_errors(trace)},
          {"passages", std::move(passages)},
          {"weights_xxh3", header.weights_xxh3},
          {"tokenizer_xxh3", header.tokenizer_xxh3},
          {"capture", Json(*header.capture)}};
}

std::string segments_text(const std::vector<Segment>& segments) {
  std::string text;
  for (const Segment& segment : segments)
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", segment.tokens, name_of(segment.kind));
  return text;
}

void print_info(const TraceReader& trace) {
  const TraceHeader& header = trace.header();
  const ModelShape& shape = header.shape;
  const auto print = [](std::string_view label, std::string_view text) {
    fmt::print("{:<10}{}\n", label, text);
  };
  print("trace", trace.directory().string());
  print("hash", trace.hash());
  print("model", header.model);
  print("layers",
        fmt::format("{}, {} query and {} KV heads of {}, {}", shape.layers, shape.query_heads,
                    shape.kv_heads, shape.head_size, torch_name(shape.dtype)));
  print("rope",
        fmt::format("{}, {} of {} dimensions rotated; q and k rounded after RoPE: {}",
                    header.rope_config->value("rope_type", ""), trace.row(0).rope.rotated_dims(),
                    shape.head_size, name_of(header.rounding)));
  if (!header.rows.empty()) print("rows", rows_text(header.rows));
  print("tokens", fmt::format("{}: {}", trace.tokens(), segments_text(trace.segments())));
  print("files", fmt::format("{}, {:.1f} MiB", shards_text(trace),
                             static_cast<double>(file_bytes(trace)) / (1 << 20)));
  print("extras", extras_text(trace));
  if (const std::string warning = key_quantization_warning(trace); !warning.empty())
    print("keys", warning);
  print("passages", passages_text(trace));
  print("capture", json_text(*header.capture, -1));
}

int info(const std::string& directory, bool json) {
  const TraceReader trace = TraceReader::open(directory);
  if (json)
    print_json(info_json(trace));
  else
    print_info(trace);
  return 0;
}

void print_check(const TraceReader& trace, const TraceCheck& check) {
  for (const std::string& problem : check.problems) fmt::print("{}\n", problem);
  fmt::print("{}: {}: {}", trace.directory().string(), check.ok ? "verified" : "FAILED",
             shards_text(trace));
  if (check.rows > 0)
    fmt::print(
        ", {} rows recomputed, largest error of an output {:.2g}, of a log-sum-exp {:.2g} "
        "(at most {:g})",
        check.rows, check.worst_out, check.worst_lse, check.tolerance);
  if (check.selections > 0) fmt::print(", {} selections checked", check.selections);
  fmt::print("\n");
}

int verify(const std::string& directory, const Request& request) {
  const TraceReader trace = TraceReader::open(directory);
  const TraceCheck check = verify_trace(trace, request.threads);
  if (request.json) {
    print_json({{"trace", directory},
                {"ok", check.ok},
                {"shards", trace.shards().size()},
                {"rows", check.rows},
                {"selections", check.selections},
                {"worst_output_error", number_or_null(check.worst_out)},
                {"worst_lse_error", number_or_null(check.worst_lse)},
                {"tolerance", check.tolerance},
                {"problems", check.problems}});
  } else {
    print_check(trace, check);
  }
  return check.ok ? 0 : 1;
}

int seal(const std::string& directory, bool json) {
  const std::uint32_t tokens = seal_trace(directory);
  if (json)
    print_json({{"trace", directory}, {"tokens", tokens}});
  else
    fmt::print("{}: sealed, {} tokens kept; `kvlab trace verify {}` checks them\n", directory,
               tokens, directory);
  return 0;
}

int run(const Request& request) {
  const std::string &action = request.words[0], &directory = request.words[1];
  if (action == "info") return info(directory, request.json);
  if (action == "verify") return verify(directory, request);
  if (action == "seal") return seal(directory, request.json);
  throw std::invalid_argument(fmt::format("unknown action '{}': {}", action, kUsage));
}

}  // namespace

Command trace_command() {
  return {.name = "trace",
          .summary = "describes a trace, verifies it, or completes an interrupted capture",
          .usage = "info|verify|seal TRACE [--json] [--threads N]",
          .example = "kvlab trace verify trace",
          .positional = "action",
          .prepare = make_prepare(add_options, check, run)};
}

}  // namespace kvlab
