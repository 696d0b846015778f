#include "traces/manifest.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "traces/base/json.hpp"
#include "traces/base/text.hpp"

namespace kvlab {
namespace {

using nlohmann::json;

std::runtime_error error(std::string_view what, std::string_view text) {
  return std::runtime_error(fmt::format("{}: {}", what, text));
}

std::string_view name_of(Rounding rounding) {
  return rounding == Rounding::model_dtype ? "model_dtype" : "none";
}
std::string_view name_of(SegmentKind kind) {
  return kind == SegmentKind::prompt ? "prompt" : "decode";
}

Rounding parse_rounding(const std::string& name, std::string_view what) {
  for (const Rounding rounding : {Rounding::model_dtype, Rounding::none})
    if (name == name_of(rounding)) return rounding;
  throw error(what, fmt::format("rounding {} is not known; \"model_dtype\" or \"none\" is expected",
                                json_quoted(name)));
}

SegmentKind parse_kind(const std::string& name, std::string_view what) {
  for (const SegmentKind kind : {SegmentKind::prompt, SegmentKind::decode})
    if (name == name_of(kind)) return kind;
  throw error(what,
              fmt::format("segment kind {} is not known; \"prompt\" or \"decode\" is expected",
                          json_quoted(name)));
}

/// `decode` where there is none: so it was before traces said it, unless asked otherwise.
Span parse_span(const json& object, std::string_view what) {
  if (!object.contains("span")) return Span::decode;
  const std::string name = json_string(object, "span", what);
  for (const Span span : {Span::decode, Span::all})
    if (name == kvlab::name_of(span)) return span;
  throw error(what, fmt::format("span {} is not known; \"decode\" or \"all\" is expected",
                                json_quoted(name)));
}

/// 16 lower-case hex digits, or nothing where that is allowed.
std::string parse_hash(const json& object, std::string_view key, std::string_view what,
                       bool may_be_empty) {
  std::string hash = json_string(object, key, what);
  const bool is_hash =
      hash.size() == 16 && hash.find_first_not_of("0123456789abcdef") == std::string::npos;
  if (is_hash || (may_be_empty && hash.empty())) return hash;
  throw error(what, fmt::format("{} is {}; 16 hex digits are expected", json_quoted(key),
                                json_quoted(hash)));
}

json config_json(const TraceHeader& header) {
  const ModelShape& shape = header.shape;
  const json plain_rope = {{"rope_type", "default"}};
  return {{"layers", shape.layers},
          {"query_heads", shape.query_heads},
          {"kv_heads", shape.kv_heads},
          {"head_size", shape.head_size},
          {"dtype", torch_name(shape.dtype)},
          {"rope", header.rope_config->is_null() ? plain_rope : *header.rope_config}};
}

/// The types whose angles are position * inv_freq at any length of the sequence. The parameters are
/// for people: inv_freq is what counts.
void check_rope(const json& rope, std::string_view what) {
  constexpr std::string_view known[] = {"default", "linear", "llama3", "yarn"};
  const std::string type = json_string(rope, "rope_type", fmt::format("{}: config.rope", what));
  if (std::find(std::begin(known), std::end(known), type) == std::end(known))
    throw error(what, fmt::format("rope_type {} is not known; default, linear, llama3 or yarn is "
                                  "expected",
                                  json_quoted(type)));
}

void parse_config(const json& config, std::string_view what, TraceHeader& header) {
  const std::string where = fmt::format("{}: config", what);
  // Whatever else a config says may change what attention computes: sliding windows, soft caps, …
  json_refuse_unknown(config, where,
                      {"layers", "query_heads", "kv_heads", "head_size", "dtype", "rope"});
  ModelShape& shape = header.shape;
  shape.layers = json_get<std::uint32_t>(config, "layers", where, 1, kMaxLayers);
  shape.query_heads = json_get<std::uint32_t>(config, "query_heads", where, 1, kMaxHeads);
  shape.kv_heads = json_get<std::uint32_t>(config, "kv_heads", where, 1, kMaxHeads);
  shape.head_size = json_get<std::uint32_t>(config, "head_size", where, 1, kMaxHeadSize);
  if (shape.query_heads % shape.kv_heads != 0)
    throw error(where,
                fmt::format("{} query heads cannot share {} KV heads; a multiple is expected",
                            shape.query_heads, shape.kv_heads));
  const std::string dtype_name = json_string(config, "dtype", where);
  const auto dtype = dtype_from_torch(dtype_name);
  if (!dtype || *dtype == Dtype::i32)
    throw error(where,
                fmt::format("dtype {} is not known; float32, float16 or bfloat16 is expected",
                            json_quoted(dtype_name)));
  shape.dtype = *dtype;
  header.rope_config = json_object(config, "rope", where);
  check_rope(*header.rope_config, what);
}

json spans_json(const std::vector<NamedSpan>& spans) {
  json list = json::array();
  for (const NamedSpan& span : spans)
    list.push_back({{"name", span.name}, {"start", span.start}, {"tokens", span.tokens}});
  return list;
}

/// Names that differ, each of at least one of the trace's first `tokens`.
std::vector<NamedSpan> parse_spans(const json& list, std::uint32_t tokens, std::string_view what) {
  std::vector<NamedSpan> spans;
  for (const json& item : list) {
    const std::string where = fmt::format("{}: spans[{}]", what, spans.size());
    json_refuse_unknown(item, where, {"name", "start", "tokens"});
    NamedSpan span{json_string(item, "name", where), 0, 0};
    if (span.name.empty() || has_controls(span.name))
      throw error(where, fmt::format("the name is {}; one without control characters is expected",
                                     json_quoted(span.name)));
    span.start = json_get<std::uint32_t>(item, "start", where, 0, tokens - 1);
    span.tokens = json_get<std::uint32_t>(item, "tokens", where, 1, tokens - span.start);
    for (const NamedSpan& other : spans)
      if (other.name == span.name)
        throw error(where, fmt::format("the name {} is there twice", json_quoted(span.name)));
    spans.push_back(std::move(span));
  }
  return spans;
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

/// Files `key` of 1024 tokens from 0 on, the last one maybe shorter, called as `name` says.
std::vector<ShardInfo> parse_shards(const json& object, std::string_view key,
                                    std::string (*name)(std::size_t), std::uint32_t tokens,
                                    std::string_view what) {
  const json& list = json_array(object, key, what);
  const std::size_t count = (std::size_t{tokens} + kShardTokens - 1) / kShardTokens;
  if (list.size() != count)
    throw error(what,
                fmt::format("{} {} listed; {} tokens take {}", list.size(), key, tokens, count));
  std::vector<ShardInfo> shards;
  for (const json& item : list) {
    const std::string where = fmt::format("{}: {}[{}]", what, key, shards.size());
    json_refuse_unknown(item, where, {"file", "first", "tokens", "xxh3"});
    const auto first = static_cast<std::uint32_t>(shards.size()) * kShardTokens;
    const std::uint32_t length = std::min(kShardTokens, tokens - first);
    ShardInfo shard{json_string(item, "file", where),
                    json_get<std::uint32_t>(item, "first", where, first, first),
                    json_get<std::uint32_t>(item, "tokens", where, length, length),
                    parse_hash(item, "xxh3", where, false)};
    if (shard.file != name(shards.size()))
      throw error(where, fmt::format("\"file\" is {}; {} is expected", json_quoted(shard.file),
                                     name(shards.size())));
    shards.push_back(std::move(shard));
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
    object["grad"] = {{"draws", gradients->draws},
                      {"seed", gradients->seed},
                      {"span", kvlab::name_of(gradients->span)},
                      {"files", shards_json(gradients->files)}};
  for (const TraceExtras::Column& column : extras.columns)
    object["columns"].push_back(
        {{"name", column.name}, {"file", column_file(column.name)}, {"xxh3", column.xxh3}});
  return object;
}

/// A seed, which JSON holds as a number.
std::uint64_t parse_seed(const json& object, std::string_view what) {
  return static_cast<std::uint64_t>(json_get<std::int64_t>(object, "seed", what, 0, INT64_MAX));
}

/// Names that differ, each with a file called by it.
std::vector<TraceExtras::Column> parse_columns(const json& list, std::string_view what) {
  std::vector<TraceExtras::Column> columns;
  for (const json& item : list) {
    const std::string where = fmt::format("{}.columns[{}]", what, columns.size());
    json_refuse_unknown(item, where, {"name", "file", "xxh3"});
    TraceExtras::Column column{json_string(item, "name", where),
                               parse_hash(item, "xxh3", where, false)};
    if (!is_trace_column_name(column.name))
      throw error(where, fmt::format("the name is {}; up to 64 letters, digits, '_', '-' and '.' "
                                     "are expected",
                                     json_quoted(column.name)));
    if (const std::string file = json_string(item, "file", where); file != column_file(column.name))
      throw error(where, fmt::format("\"file\" is {}; {} is expected", json_quoted(file),
                                     column_file(column.name)));
    for (const TraceExtras::Column& other : columns)
      if (other.name == column.name)
        throw error(where, fmt::format("the name {} is there twice", json_quoted(column.name)));
    columns.push_back(std::move(column));
  }
  return columns;
}

TraceExtras parse_extras(const json& object, std::uint32_t tokens, std::string_view what) {
  const std::string where = fmt::format("{}: extras", what);
  json_refuse_unknown(object, where, {"residual_norm2", "sketch", "grad", "columns"});
  TraceExtras extras;
  if (object.contains("residual_norm2")) {
    json_refuse_unknown(json_object(object, "residual_norm2", where), where, {});
    extras.residual_norm2 = true;
  }
  if (object.contains("sketch")) {
    const json& sketch = json_object(object, "sketch", where);
    json_refuse_unknown(sketch, where, {"file", "xxh3", "seed"});
    if (const std::string file = json_string(sketch, "file", where); file != kSketchFile)
      throw error(where,
                  fmt::format("\"file\" is {}; {} is expected", json_quoted(file), kSketchFile));
    extras.sketch = {parse_seed(sketch, where), parse_hash(sketch, "xxh3", where, false)};
  }
  if (object.contains("grad")) {
    const json& gradients = json_object(object, "grad", where);
    const std::string what_grad = where + ".grad";
    json_refuse_unknown(gradients, what_grad, {"draws", "seed", "span", "files"});
    extras.gradients = {json_get<std::uint32_t>(gradients, "draws", what_grad, 1, kMaxDraws),
                        parse_seed(gradients, what_grad), parse_span(gradients, what_grad),
                        parse_shards(gradients, "files", gradient_name, tokens, what_grad)};
  }
  if (object.contains("columns"))
    extras.columns = parse_columns(json_array(object, "columns", where), where);
  return extras;
}

/// What the manifest and every shard say alike.
json description_json(const TraceHeader& header) {
  return {{"format", kTraceFormat},
          {"model", header.model},
          {"config", config_json(header)},
          {"rounding", name_of(header.rounding)},
          {"weights_xxh3", header.weights_xxh3},
          {"tokenizer_xxh3", header.tokenizer_xxh3},
          {"capture", header.capture->is_null() ? json::object() : *header.capture}};
}

TraceHeader parse_description(const json& object, std::string_view what) {
  TraceHeader header;
  header.model = json_name(object, "model", what);
  parse_config(json_object(object, "config", what), what, header);
  header.rounding = parse_rounding(json_string(object, "rounding", what), what);
  header.weights_xxh3 = parse_hash(object, "weights_xxh3", what, true);
  header.tokenizer_xxh3 = parse_hash(object, "tokenizer_xxh3", what, true);
  header.capture = json_object(object, "capture", what);
  return header;
}

/// JSON text; bytes that are not UTF-8 (in a folder's name, say) become U+FFFD.
std::string text_of(const json& value, int indent = -1) { return json_text(value, indent); }

json segments_json(const std::vector<Segment>& segments) {
  json list = json::array();
  for (const Segment& segment : segments)
    list.push_back(
        {{"start", segment.start}, {"tokens", segment.tokens}, {"kind", name_of(segment.kind)}});
  return list;
}

/// Segments that follow each other from 0 to `tokens`.
std::vector<Segment> parse_segments(const json& list, std::uint32_t tokens, std::string_view what) {
  std::vector<Segment> segments;
  std::uint32_t next = 0;
  for (const json& item : list) {
    const std::string where = fmt::format("{}: segments[{}]", what, segments.size());
    json_refuse_unknown(item, where, {"start", "tokens", "kind"});
    Segment segment{};
    segment.start = json_get<std::uint32_t>(item, "start", where, next, next);
    if (next == tokens) throw error(where, "begins past the last token");
    segment.tokens = json_get<std::uint32_t>(item, "tokens", where, 1, tokens - next);
    segment.kind = parse_kind(json_string(item, "kind", where), what);
    next += segment.tokens;
    segments.push_back(segment);
  }
  if (next != tokens)
    throw error(what,
                fmt::format("segments cover {} of {} tokens; all are expected", next, tokens));
  return segments;
}

std::int64_t check_format(const json& manifest, std::string_view what) {
  const auto format = json_get<std::int64_t>(manifest, "format", what, 1, INT64_MAX);
  if (format > kTraceFormat)
    throw error(what,
                fmt::format("trace format {}; this kvlab reads format {}, a later one is needed",
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
  object["spans"] = spans_json(manifest.header.spans);
  return text_of(object, 1) + "\n";
}

Manifest parse_manifest(std::string_view text, std::string_view what) {
  const json object = parse_json(text, what);
  const bool has_extras = check_format(object, what) > 1;
  json_refuse_unknown(
      object, what,
      {"format", "model", "config", "rounding", "tokens", "prompt_tokens", "segments", "shards",
       "tokens_xxh3", "weights_xxh3", "tokenizer_xxh3", "capture", has_extras ? "extras" : "format",
       has_extras ? "spans" : "format"});
  Manifest manifest;
  manifest.header = parse_description(object, what);
  manifest.tokens = json_get<std::uint32_t>(object, "tokens", what, 1, kMaxTraceTokens);
  manifest.segments = parse_segments(json_array(object, "segments", what), manifest.tokens, what);
  const std::uint32_t prompt = prompt_tokens_of(manifest.segments);
  manifest.prompt_tokens = json_get<std::uint32_t>(object, "prompt_tokens", what, prompt, prompt);
  manifest.shards = parse_shards(object, "shards", shard_name, manifest.tokens, what);
  manifest.tokens_xxh3 = parse_hash(object, "tokens_xxh3", what, false);
  if (has_extras) {
    manifest.extras = parse_extras(json_object(object, "extras", what), manifest.tokens, what);
    manifest.header.spans = parse_spans(json_array(object, "spans", what), manifest.tokens, what);
  }
  return manifest;
}

std::map<std::string, std::string> shard_metadata(const ShardMetadata& metadata) {
  json object = description_json(metadata.header);
  object["first"] = metadata.first;
  object["tokens"] = metadata.tokens;
  object["segments"] = segments_json(metadata.segments);
  object["spans"] = spans_json(metadata.header.spans);
  std::map<std::string, std::string> texts;
  for (const auto& [key, value] : object.items())
    texts[key] = value.is_string() ? value.get<std::string>() : text_of(value);
  return texts;
}

ShardMetadata parse_shard_metadata(const SafetensorsFile& file) {
  const std::string what = file.path().string() + ": __metadata__";
  json object = file.metadata();
  for (const char* key : {"format", "config", "first", "tokens", "segments", "capture"})
    object[key] = parse_json(json_string(object, key, what), fmt::format("{} {}", what, key));
  const bool has_spans = check_format(object, what) > 1;
  ShardMetadata metadata;
  metadata.header = parse_description(object, what);
  metadata.tokens = json_get<std::uint32_t>(object, "tokens", what, 1, kShardTokens);
  metadata.first =
      json_get<std::uint32_t>(object, "first", what, 0, kMaxTraceTokens - metadata.tokens);
  metadata.segments =
      parse_segments(json_array(object, "segments", what), metadata.first + metadata.tokens, what);
  if (has_spans) {
    // Of the whole trace, whose length a shard does not know.
    object["spans"] = parse_json(json_string(object, "spans", what), what + " spans");
    metadata.header.spans = parse_spans(json_array(object, "spans", what), kMaxTraceTokens, what);
  }
  return metadata;
}

bool same_description(const TraceHeader& a, const TraceHeader& b) {
  return description_json(a) == description_json(b);
}

void check_header(const TraceHeader& header) {
  try {
    parse_description(parse_json(text_of(description_json(header)), "trace header"),
                      "trace header");
    check_rope_and_scale(header, "trace header");
  } catch (const std::runtime_error& wrong) {
    throw std::invalid_argument(wrong.what());
  }
}

void check_rope_and_scale(const TraceHeader& header, std::string_view what) {
  const auto positive = [](float value) { return std::isfinite(value) && value > 0; };
  if (header.rope.rotated() > header.shape.head_size)
    throw error(what,
                fmt::format("inv_freq has {} elements; at most half the head size, {}, is right",
                            header.rope.inv_freq.size(), header.shape.head_size / 2));
  for (const float frequency : header.rope.inv_freq)
    if (!std::isfinite(frequency) || frequency < 0)
      throw error(
          what, fmt::format("inv_freq holds {}; finite numbers from 0 on are expected", frequency));
  if (!positive(header.rope.factor))
    throw error(
        what, fmt::format("rope_factor is {}; a positive number is expected", header.rope.factor));
  if (!positive(header.softmax_scale))
    throw error(what, fmt::format("softmax_scale is {}; a positive number is expected",
                                  header.softmax_scale));
}

std::vector<Segment> clipped(const std::vector<Segment>& segments, std::uint32_t tokens) {
  std::vector<Segment> result;
  for (Segment segment : segments) {
    if (segment.start >= tokens) break;
    segment.tokens = std::min(segment.tokens, tokens - segment.start);
    result.push_back(segment);
  }
  return result;
}

std::vector<NamedSpan> clipped(const std::vector<NamedSpan>& spans, std::uint32_t tokens) {
  std::vector<NamedSpan> result;
  for (const NamedSpan& span : spans)
    if (span.start < tokens && span.tokens <= tokens - span.start) result.push_back(span);
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
