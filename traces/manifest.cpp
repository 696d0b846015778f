#include "traces/manifest.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <stdexcept>
#include <unordered_set>

#include "traces/base/json.hpp"
#include "traces/base/json_fields.hpp"
#include "traces/selections.hpp"

namespace kvlab {
namespace {

using nlohmann::json;

std::runtime_error error(std::string_view what, std::string_view text) {
  return std::runtime_error(fmt::format("{}: {}", what, text));
}

/// Parses a text that names `one` or `other`.
template <class Name>
Name parse_name(const JsonFields& fields, std::string_view key, Name one, Name other) {
  const std::string name = fields.text(key);
  for (const Name known : {one, other})
    if (name == name_of(known)) return known;
  fields.refuse(key, fmt::format("\"{}\" or \"{}\" is expected", name_of(one), name_of(other)));
}

/// Parses 16 lower-case hex digits, or an empty text if `may_be_empty`.
std::string parse_hash(const JsonFields& fields, std::string_view key, bool may_be_empty = false) {
  std::string hash = fields.text(key);
  const bool is_hash =
      hash.size() == 16 && hash.find_first_not_of("0123456789abcdef") == std::string::npos;
  if (!is_hash && !(may_be_empty && hash.empty())) fields.refuse(key, "16 hex digits are expected");
  return hash;
}

json rows_json(const TraceHeader& header) {
  const ModelShape& shape = header.shape;
  json list = json::array();
  for (const RowSpec& row : header.rows)
    list.push_back({{"layer", shape.number(static_cast<std::uint32_t>(list.size()))},
                    {"span", row.window},
                    {"softcap", row.softcap},
                    {"rope", row.table},
                    {"scale", row.scale},
                    {"query_heads", shape.query_heads},
                    {"kv_heads", shape.kv_heads},
                    {"key_size", shape.head_size},
                    {"value_size", shape.head_size}});
  return list;
}

json config_json(const TraceHeader& header) {
  const ModelShape& shape = header.shape;
  const json plain_rope = {{"rope_type", "default"}};
  json config{{"layers", shape.layers},
              {"query_heads", shape.query_heads},
              {"kv_heads", shape.kv_heads},
              {"head_size", shape.head_size},
              {"dtype", torch_name(shape.dtype)},
              {"rope", header.rope_config->is_null() ? plain_rope : *header.rope_config}};
  if (!header.rows.empty()) config["rows"] = rows_json(header);
  return config;
}

/// Refuses RoPE types whose angles are not position * inv_freq at every sequence length. Other RoPE
/// parameters are not checked, because kvlab computes the angles from inv_freq alone.
void check_rope(const JsonFields& rope) {
  constexpr std::string_view known[] = {"default", "linear", "llama3", "yarn"};
  if (std::ranges::find(known, rope.text("rope_type")) == std::end(known))
    rope.refuse("rope_type", "default, linear, llama3 or yarn is expected");
}

/// Throws unless a layer has the number of heads and the head size of the whole model, because no
/// reader of traces supports layers of different shapes.
void check_head_shape(const JsonFields& item, const ModelShape& shape) {
  const std::pair<std::string_view, std::uint32_t> sizes[] = {{"query_heads", shape.query_heads},
                                                              {"kv_heads", shape.kv_heads},
                                                              {"key_size", shape.head_size},
                                                              {"value_size", shape.head_size}};
  for (const auto& [key, expected] : sizes)
    if (item.size(key, kMaxHeads) != expected)
      item.refuse(key, fmt::format("{} is expected, as in all layers", expected));
}

/// Parses the rows (RowSpec): one per layer, in ascending order of layer numbers.
void parse_rows(const JsonFields& config, TraceHeader& header) {
  constexpr double kMax = 1e30;
  ModelShape& shape = header.shape;
  std::vector<bool> used(shape.layers);
  std::uint32_t tables = 0, next = 0;
  const std::vector<JsonFields> items = config.objects("rows");
  if (items.size() != shape.layers)
    throw error(config.where(), fmt::format("{} rows; one row for each of {} layers is expected",
                                            items.size(), shape.layers));
  for (const JsonFields& item : items) {
    item.allow_only({"layer", "span", "softcap", "rope", "scale", "query_heads", "kv_heads",
                     "key_size", "value_size"});
    check_head_shape(item, shape);
    shape.numbers.push_back(
        static_cast<std::uint32_t>(item.integer("layer", next, kMaxLayers - 1)));
    next = shape.numbers.back() + 1;
    header.rows.push_back({.window = item.whole32("span", kMaxTraceTokens),
                           .softcap = static_cast<float>(item.number("softcap", 0, kMax)),
                           .table = item.whole32("rope", shape.layers - 1),
                           .scale = static_cast<float>(item.number("scale", 0, kMax))});
    used[header.rows.back().table] = true;
    tables = std::max(tables, header.rows.back().table + 1);
  }
  if (next == shape.layers) shape.numbers.clear();
  for (std::uint32_t table = 0; table < tables; ++table)
    if (!used[table])
      throw error(
          config.where(),
          fmt::format("no row has rope {}; tables should be numbered from 0 on without a gap",
                      table));
}

void parse_config(const JsonFields& config, TraceHeader& header, bool has_rows) {
  // Refuse other keys, because they may change what attention computes.
  config.allow_only({"layers", "query_heads", "kv_heads", "head_size", "dtype", "rope",
                     has_rows ? "rows" : "rope"});
  ModelShape& shape = header.shape;
  shape.layers = config.size("layers", kMaxLayers);
  shape.query_heads = config.size("query_heads", kMaxHeads);
  shape.kv_heads = config.size("kv_heads", kMaxHeads);
  shape.head_size = config.size("head_size", kMaxHeadSize);
  if (shape.query_heads % shape.kv_heads != 0)
    throw error(
        config.where(),
        fmt::format("{0} query heads cannot share {1} KV heads; a multiple of {1} is expected",
                    shape.query_heads, shape.kv_heads));
  const auto dtype = dtype_from_torch(config.text("dtype"));
  if (!dtype || *dtype == Dtype::i32)
    config.refuse("dtype", "float32, float16 or bfloat16 is expected");
  shape.dtype = *dtype;
  check_rope(config.object("rope"));
  header.rope_config = config.any("rope");
  if (has_rows) parse_rows(config, header);
}

json passages_json(const std::vector<Passage>& passages) {
  json list = json::array();
  for (const Passage& passage : passages)
    list.push_back({{"name", passage.name}, {"start", passage.start}, {"tokens", passage.tokens}});
  return list;
}

/// Throws if an earlier item has the same name.
void refuse_known_name(const JsonFields& item, const std::string& name,
                       std::unordered_set<std::string>& known) {
  if (!known.insert(name).second)
    throw error(item.where(), fmt::format("the name {} appears twice", json_quoted(name)));
}

/// Parses passages: names are unique, and each covers at least one of the first `tokens` tokens.
std::vector<Passage> parse_passages(const JsonFields& fields, std::uint32_t tokens) {
  std::vector<Passage> passages;
  std::unordered_set<std::string> known;
  for (const JsonFields& item : fields.objects("spans")) {
    item.allow_only({"name", "start", "tokens"});
    Passage passage{item.text("name"), item.whole32("start", tokens - 1), 0};
    if (passage.name.empty()) item.refuse("name", "a text that is not empty is expected");
    passage.tokens = item.size("tokens", tokens - passage.start);
    refuse_known_name(item, passage.name, known);
    passages.push_back(std::move(passage));
  }
  return passages;
}

json shards_json(const std::vector<ShardInfo>& shards) {
  json list = json::array();
  for (const ShardInfo& shard : shards)
    list.push_back({{"file", shard.file},
                    {"first", shard.first},
                    {"tokens", shard.tokens},
                    {"xxh3", shard.xxh3}});
  return list;
}

/// Throws unless the text is `expected`.
void check_text(const JsonFields& fields, std::string_view key, std::string_view expected) {
  if (fields.text(key) != expected) fields.refuse(key, fmt::format("{} is expected", expected));
}

/// Parses the list `key` of files. Each has 1,024 tokens, from token 0 on, and the last one may
/// have fewer. `name` gives the name of each file.
std::vector<ShardInfo> parse_shards(const JsonFields& fields, std::string_view key,
                                    std::string (*name)(std::size_t), std::uint32_t tokens) {
  const std::vector<JsonFields> list = fields.objects(key);
  const std::size_t count = (std::size_t{tokens} + kShardTokens - 1) / kShardTokens;
  if (list.size() != count)
    throw error(fields.where(),
                fmt::format("lists {} {}, but {} tokens need {}", list.size(), key, tokens, count));
  std::vector<ShardInfo> shards;
  for (const JsonFields& item : list) {
    item.allow_only({"file", "first", "tokens", "xxh3"});
    const auto first = static_cast<std::uint32_t>(shards.size()) * kShardTokens;
    const std::uint32_t length = std::min(kShardTokens, tokens - first);
    item.integer("first", first, first);
    item.integer("tokens", length, length);
    check_text(item, "file", name(shards.size()));
    shards.push_back({item.text("file"), first, length, parse_hash(item, "xxh3")});
  }
  return shards;
}

json extras_json(const TraceExtras& extras) {
  json object = json::object();
  if (extras.residual_norm2) object["residual_norm2"] = json::object();
  if (extras.sketch)
    object["sketch"] = {
        {"file", kSketchFile}, {"xxh3", extras.sketch->xxh3}, {"seed", extras.sketch->seed}};
  if (const auto& gradients = extras.gradients)
    object["grad"] = {{"draws", gradients->gradient_samples},
                      {"seed", gradients->seed},
                      {"span", name_of(gradients->queries)},
                      {"files", shards_json(gradients->files)}};
  for (const TraceExtras::Feature& feature : extras.features)
    object["columns"].push_back(
        {{"name", feature.name}, {"file", feature_file(feature.name)}, {"xxh3", feature.xxh3}});
  if (const auto& selections = extras.selections)
    object["selected"] = {{"file", kSelectedFile},
                          {"xxh3", selections->xxh3},
                          {"queries", name_of(selections->queries)}};
  return object;
}

/// Parses features: names are unique, and each file is named after its feature.
std::vector<TraceExtras::Feature> parse_features(const JsonFields& fields) {
  std::vector<TraceExtras::Feature> features;
  std::unordered_set<std::string> known;
  for (const JsonFields& item : fields.objects("columns")) {
    item.allow_only({"name", "file", "xxh3"});
    features.push_back({item.text("name"), parse_hash(item, "xxh3")});
    if (!is_trace_feature_name(features.back().name))
      item.refuse("name", "up to 64 letters, digits, '_', '-' and '.' are expected");
    check_text(item, "file", feature_file(features.back().name));
    refuse_known_name(item, features.back().name, known);
  }
  return features;
}

TraceExtras parse_extras(const JsonFields& fields, std::uint32_t tokens) {
  fields.allow_only({"residual_norm2", "sketch", "grad", "columns", "selected"});
  TraceExtras extras;
  if (fields.has("residual_norm2")) {
    fields.object("residual_norm2").allow_only({});
    extras.residual_norm2 = true;
  }
  if (fields.has("sketch")) {
    const JsonFields sketch = fields.object("sketch");
    sketch.allow_only({"file", "xxh3", "seed"});
    check_text(sketch, "file", kSketchFile);
    extras.sketch = {sketch.whole("seed"), parse_hash(sketch, "xxh3")};
  }
  if (fields.has("grad")) {
    const JsonFields grad = fields.object("grad");
    grad.allow_only({"draws", "seed", "span", "files"});
    // Older traces do not record the queries, so this assumes the default, `decode`.
    const Queries queries = grad.has("span")
                                ? parse_name(grad, "span", Queries::decode, Queries::all)
                                : Queries::decode;
    extras.gradients = {grad.size("draws", kMaxGradientSamples), grad.whole("seed"), queries,
                        parse_shards(grad, "files", gradient_name, tokens)};
  }
  if (fields.has("columns")) extras.features = parse_features(fields);
  if (fields.has("selected")) {
    const JsonFields selected = fields.object("selected");
    selected.allow_only({"file", "xxh3", "queries"});
    check_text(selected, "file", kSelectedFile);
    extras.selections = {parse_name(selected, "queries", Queries::decode, Queries::all),
                         parse_hash(selected, "xxh3")};
  }
  return extras;
}

/// Whether the trace has selections and neither queries nor keys nor values. In such a trace, only
/// features and selections are allowed as extras, because the other extras describe queries, keys
/// or values.
bool has_selections_only(const JsonFields& fields) {
  if (!fields.objects("shards").empty() || !fields.object("extras").has("selected")) return false;
  fields.object("extras").allow_only({"columns", "selected"});
  return true;
}

/// The description of the trace, which the manifest and every shard contain.
json description_json(const TraceHeader& header) {
  return {{"format", header.format()},
          {"model", header.model},
          {"config", config_json(header)},
          {"rounding", name_of(header.rounding)},
          {"weights_xxh3", header.weights_xxh3},
          {"tokenizer_xxh3", header.tokenizer_xxh3},
          {"capture", header.capture->is_null() ? json::object() : *header.capture}};
}

TraceHeader parse_description(const JsonFields& fields, std::int64_t format) {
  TraceHeader header;
  header.model = fields.text("model");
  parse_config(fields.object("config"), header, format > 2);
  header.rounding = parse_name(fields, "rounding", Rounding::model_dtype, Rounding::none);
  header.weights_xxh3 = parse_hash(fields, "weights_xxh3", true);
  header.tokenizer_xxh3 = parse_hash(fields, "tokenizer_xxh3", true);
  header.capture = fields.object("capture").json();
  return header;
}

/// JSON text. Bytes that are not UTF-8 (in a folder name, for example) become U+FFFD.
std::string text_of(const json& value, int indent = -1) { return json_text(value, indent); }

json segments_json(const std::vector<Segment>& segments) {
  json list = json::array();
  for (const Segment& segment : segments)
    list.push_back(
        {{"start", segment.start}, {"tokens", segment.tokens}, {"kind", name_of(segment.kind)}});
  return list;
}

/// Parses segments that are contiguous from 0 to `tokens`.
std::vector<Segment> parse_segments(const JsonFields& fields, std::uint32_t tokens) {
  std::vector<Segment> segments;
  std::uint32_t next = 0;
  for (const JsonFields& item : fields.objects("segments")) {
    item.allow_only({"start", "tokens", "kind"});
    item.integer("start", next, next);
    if (next == tokens) throw error(item.where(), "begins past the last token");
    segments.push_back({next, item.size("tokens", tokens - next),
                        parse_name(item, "kind", SegmentKind::prompt, SegmentKind::decode)});
    next += segments.back().tokens;
  }
  if (next != tokens)
    throw error(
        fields.where(),
        fmt::format("segments cover only {} of {} tokens; they should cover all", next, tokens));
  return segments;
}

std::int64_t check_format(const JsonFields& fields) {
  const std::int64_t format = fields.integer("format", 1, INT64_MAX);
  if (format > kTraceFormat)
    throw error(
        fields.where(),
        fmt::format("has trace format {}, but this kvlab reads formats up to {}; use a newer kvlab",
                    format, kTraceFormat));
  return format;
}

}  // namespace

std::string manifest_text(const Manifest& manifest) {
  json object = description_json(manifest.header);
  object["tokens"] = manifest.tokens;
  object["prompt_tokens"] = manifest.prompt_tokens;
  object["segments"] = segments_json(manifest.segments);
  object["shards"] = shards_json(manifest.shards);
  object["tokens_xxh3"] = manifest.tokens_xxh3;
  object["extras"] = extras_json(manifest.extras);
  object["spans"] = passages_json(manifest.header.passages);
  return text_of(object, 1) + "\n";
}

TraceHeader parse_header(std::string_view text) {
  const json object = parse_json(text, "trace header");
  const JsonFields fields(object, "trace header");
  TraceHeader header = parse_description(fields, 2);
  header.passages = parse_passages(fields, kMaxTraceTokens);
  return header;
}

Manifest parse_manifest(std::string_view text, std::string_view what) {
  const json object = parse_json(text, what);
  const JsonFields fields(object, std::string(what));
  const std::int64_t format = check_format(fields);
  const bool has_extras = format > 1;
  fields.allow_only({"format", "model", "config", "rounding", "tokens", "prompt_tokens", "segments",
                     "shards", "tokens_xxh3", "weights_xxh3", "tokenizer_xxh3", "capture",
                     has_extras ? "extras" : "format", has_extras ? "spans" : "format"});
  Manifest manifest;
  manifest.header = parse_description(fields, format);
  manifest.tokens = fields.size("tokens", kMaxTraceTokens);
  manifest.segments = parse_segments(fields, manifest.tokens);
  manifest.prompt_tokens = prompt_tokens_of(manifest.segments);
  fields.integer("prompt_tokens", manifest.prompt_tokens, manifest.prompt_tokens);
  if (!has_extras || !has_selections_only(fields))
    manifest.shards = parse_shards(fields, "shards", shard_name, manifest.tokens);
  manifest.tokens_xxh3 = parse_hash(fields, "tokens_xxh3");
  if (has_extras) {
    manifest.extras = parse_extras(fields.object("extras"), manifest.tokens);
    manifest.header.passages = parse_passages(fields, manifest.tokens);
  }
  return manifest;
}

std::map<std::string, std::string> shard_metadata(const ShardMetadata& metadata) {
  json object = description_json(metadata.header);
  object["first"] = metadata.first;
  object["tokens"] = metadata.tokens;
  object["segments"] = segments_json(metadata.segments);
  object["spans"] = passages_json(metadata.header.passages);
  std::map<std::string, std::string> texts;
  for (const auto& [key, value] : object.items())
    texts[key] = value.is_string() ? value.get<std::string>() : text_of(value);
  return texts;
}

ShardMetadata parse_shard_metadata(const SafetensorsFile& file) {
  const std::string what = file.path().string() + ": __metadata__";
  json object = file.metadata();
  const JsonFields fields(object, what);
  const auto parse = [&](const char* key) {
    object[key] = parse_json(fields.raw(key), fmt::format("{} {}", what, key));
  };
  for (const char* key : {"format", "config", "first", "tokens", "segments", "capture"}) parse(key);
  ShardMetadata metadata;
  const std::int64_t format = check_format(fields);
  metadata.header = parse_description(fields, format);
  metadata.tokens = fields.size("tokens", kShardTokens);
  metadata.first = fields.whole32("first", kMaxTraceTokens - metadata.tokens);
  metadata.segments = parse_segments(fields, metadata.first + metadata.tokens);
  if (format > 1) {
    // Passages may lie beyond the shard's tokens, because each shard stores the passages of the
    // whole trace.
    parse("spans");
    metadata.header.passages = parse_passages(fields, kMaxTraceTokens);
  }
  return metadata;
}

std::uint32_t ModelShape::layer_of(std::uint32_t number) const {
  for (std::uint32_t layer = 0; layer < layers; ++layer)
    if (this->number(layer) == number) return layer;
  return layers;
}

std::string ModelShape::numbers_text() const {
  return numbers.empty() ? fmt::format("0 to {}", layers - 1)
                         : fmt::format("{}", fmt::join(numbers, ", "));
}

RowSpec TraceHeader::row(std::uint32_t layer) const {
  return rows.empty() ? RowSpec{.scale = softmax_scale, .rope = rope} : rows[layer];
}

void TraceHeader::simplify() {
  for (const std::size_t given : {shape.numbers.size(), rows.size()})
    if (given != 0 && given != shape.layers)
      throw std::invalid_argument(
          fmt::format("trace header: {} rows or numbers; one for each of {} layers is expected",
                      given, shape.layers));
  for (std::uint32_t layer = 0; layer < shape.layers && shape.number(layer) == layer;)
    if (++layer == shape.layers) shape.numbers.clear();
  const auto like_first = [&](const RowSpec& row) {
    return row.window == 0 && row.is_plain() && row.table == 0 && row.scale == rows.front().scale;
  };
  if (shape.numbers.empty() && std::ranges::all_of(rows, like_first)) {
    if (rows.empty()) return;
    rope = rows.front().rope;
    softmax_scale = rows.front().scale;
    return rows.clear();
  }
  if (rows.empty()) rows.assign(shape.layers, row(0));
}

std::string_view name_of(Rounding rounding) {
  return rounding == Rounding::model_dtype ? "model_dtype" : "none";
}

std::string_view name_of(SegmentKind kind) {
  return kind == SegmentKind::prompt ? "prompt" : "decode";
}

bool same_description(const TraceHeader& a, const TraceHeader& b) {
  return description_json(a) == description_json(b);
}

void check_header(const TraceHeader& header) {
  try {
    const json description = parse_json(text_of(description_json(header)), "trace header");
    parse_description(JsonFields(description, "trace header"), header.format());
    check_rope_and_scale(header, "trace header");
  } catch (const std::runtime_error& wrong) {
    throw std::invalid_argument(wrong.what());
  }
}

namespace {

/// Sink logits of larger magnitude are refused, because exponentials are not defined for them.
/// verify_trace() applies the same limit to scores.
constexpr float kLargestSink = 0x1p20f;

void check_rope(const Rope& rope, const ModelShape& shape, std::string_view what) {
  if (rope.rotated_dims() > shape.head_size)
    throw error(
        what, fmt::format("inv_freq has {} elements; at most {}, half the head size, are expected",
                          rope.inv_freq.size(), shape.head_size / 2));
  for (const float frequency : rope.inv_freq)
    if (!std::isfinite(frequency) || frequency < 0)
      throw error(what,
                  fmt::format("inv_freq contains {}; finite numbers of at least 0 are expected",
                              frequency));
  if (!(std::isfinite(rope.factor) && rope.factor > 0))
    throw error(what, fmt::format("rope_factor is {}; a positive number is expected", rope.factor));
}

}  // namespace

void check_row(const RowSpec& row, const ModelShape& shape, std::uint32_t layer,
               std::string_view what) {
  check_rope(row.rope, shape, what);
  if (!(std::isfinite(row.scale) && row.scale > 0))
    throw error(what, fmt::format("softmax_scale is {}; a positive number is expected", row.scale));
  if (!(std::isfinite(row.softcap) && row.softcap >= 0))
    throw error(what,
                fmt::format("layer {}: softcap is {}; a finite number of at least 0 is expected",
                            shape.number(layer), row.softcap));
  if (!row.sinks.empty() && row.sinks.size() != shape.query_heads)
    throw error(what, fmt::format("layer {}: {} sinks; one for each of {} query heads is expected",
                                  shape.number(layer), row.sinks.size(), shape.query_heads));
  for (const float sink : row.sinks)
    if (!(std::fabs(sink) <= kLargestSink))
      throw error(what,
                  fmt::format("layer {}: a sink is {}; a logit between -2^20 and 2^20 is expected",
                              shape.number(layer), sink));
}

void check_rope_and_scale(const TraceHeader& header, std::string_view what) {
  std::map<std::uint32_t, Rope> tables;
  std::size_t width = 0;
  for (std::uint32_t layer = 0; layer < (header.rows.empty() ? 1 : header.shape.layers); ++layer) {
    const RowSpec row = header.row(layer);
    check_row(row, header.shape, layer, what);
    width = layer == 0 ? row.rope.rotated_dims() : width;
    if (!(tables.try_emplace(row.table, row.rope).first->second == row.rope) ||
        row.rope.rotated_dims() != width)
      throw error(what,
                  fmt::format("rope {}: each number should name one table, and all tables should "
                              "have the same length",
                              row.table));
  }
}

std::vector<Segment> clip(const std::vector<Segment>& segments, std::uint32_t tokens) {
  std::vector<Segment> result;
  for (Segment segment : segments) {
    if (segment.start >= tokens) break;
    segment.tokens = std::min(segment.tokens, tokens - segment.start);
    result.push_back(segment);
  }
  return result;
}

std::vector<Passage> clip(const std::vector<Passage>& passages, std::uint32_t tokens) {
  std::vector<Passage> result;
  for (const Passage& passage : passages)
    if (passage.start < tokens && passage.tokens <= tokens - passage.start)
      result.push_back(passage);
  return result;
}

std::uint32_t prompt_tokens_of(const std::vector<Segment>& segments) {
  std::uint32_t tokens = 0;
  for (const Segment& segment : segments)
    if (segment.kind == SegmentKind::prompt) tokens += segment.tokens;
  return tokens;
}

std::string shard_name(std::size_t index) { return fmt::format("shard-{:05}.safetensors", index); }
std::string gradient_name(std::size_t index) {
  return fmt::format("grad-{:05}.safetensors", index);
}

}  // namespace kvlab
