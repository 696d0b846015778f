#include "sim/head_view.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

#include "policies/observation.hpp"
#include "sim/cache/host_cache.hpp"

namespace kvlab {

TokenFeatures::TokenFeatures(const std::vector<std::string>& names, const HeadView& view,
                             const std::vector<Append>& appends, ScoreSettings settings)
    : width_(names.size()) {
  if (names.empty()) return;
  FeatureMaker maker(names, view.head_size, view.output, settings);
  for (const Append& append : appends) {
    // Without keys, all features come from view.feature_values.
    KeyValueRows rows{nullptr, nullptr, 0, append.tokens};
    if (view.k)
      rows = {view.key(append.first), view.v + append.first * view.kv_token_stride,
              view.kv_token_stride, append.tokens};
    if (view.rope) {
      rows.q = view.query(0, append.first);
      rows.q_head_stride = view.q_head_stride, rows.q_stride = view.q_token_stride;
      rows.group = view.group;
      rows.inv_freq = view.rope->inv_freq, rows.rope_factor = view.rope->factor;
      rows.softmax_scale = view.softmax_scale;
    }
    const float* const features = maker.append(rows, view.feature_values, append.first);
    values_.insert(values_.end(), features, features + append.tokens * width_);
  }
}

void add_trace_features(const TraceReader& trace, std::uint32_t layer, std::uint32_t kv_head,
                        const std::vector<std::string>& names, bool knows_projections,
                        FeaturesByName& feature_values) {
  for (const std::string& name : names) {
    if (feature_values.contains(name)) continue;
    if (is_computed(name, knows_projections) && !(scored_feature(name) && trace.has_feature(name)))
      continue;
    std::vector<float>& feature = feature_values[name];
    feature.resize(trace.tokens());
    trace.feature(name, layer, kv_head, feature.data());
  }
}

void add_supplied_features(const ResolvedConfig& config, std::uint32_t layer, std::uint32_t kv_head,
                           std::uint32_t tokens, FeaturesByName& feature_values) {
  config.add_supplied_features(layer, kv_head, feature_values);
  for (auto& [name, feature] : feature_values) feature.resize(tokens);
}

void check_head(const TraceReader& trace, std::uint32_t layer, std::uint32_t kv_head) {
  const ModelShape& shape = trace.shape();
  if (layer >= shape.layers || kv_head >= shape.kv_heads)
    throw std::invalid_argument(
        fmt::format("layer {}, KV head {}: the trace {} has {} layers of {} KV heads", layer,
                    kv_head, trace.directory().string(), shape.layers, shape.kv_heads));
}

HeadTensors read_head(const TraceReader& trace, std::uint32_t layer, std::uint32_t kv_head) {
  check_head(trace, layer, kv_head);
  const ModelShape& shape = trace.shape();
  const std::size_t floats = std::size_t{trace.tokens()} * shape.head_size;
  HeadTensors tensors{AlignedVector<float>(shape.group() * floats),
                      AlignedVector<float>(floats),
                      AlignedVector<float>(floats),
                      {},
                      {},
                      {}};
  for (std::uint32_t g = 0; g < shape.group(); ++g)
    trace.read(Part::q, layer, kv_head * shape.group() + g, 0, trace.tokens(),
               tensors.q.data() + g * floats);
  trace.read(Part::k, layer, kv_head, 0, trace.tokens(), tensors.k.data());
  trace.read(Part::v, layer, kv_head, 0, trace.tokens(), tensors.v.data());
  trace.release();
  tensors.view = {.tokens = trace.tokens(),
                  .group = shape.group(),
                  .head_size = shape.head_size,
                  .q = tensors.q.data(),
                  .q_head_stride = floats,
                  .q_token_stride = shape.head_size,
                  .k = tensors.k.data(),
                  .v = tensors.v.data(),
                  .kv_token_stride = shape.head_size};
  const RowSpec& row = trace.row(layer);
  tensors.view.sinks = row.sinks_of(kv_head, shape.group());
  tensors.view.rope = &row.rope;
  tensors.view.softmax_scale = row.scale;
  return tensors;
}

HeadTensors shape_of_head(const TraceReader& trace) {
  HeadTensors tensors;
  tensors.view = {.tokens = trace.tokens(),
                  .group = trace.shape().group(),
                  .head_size = trace.shape().head_size};
  return tensors;
}

HeadArithmetic arithmetic_of(const TraceReader& trace, std::uint32_t layer, double threshold) {
  if (!(threshold >= 0 && threshold <= 1))
    throw std::invalid_argument(
        fmt::format("request threshold {}: should be between 0 and 1", threshold));
  return {.softmax_scale = trace.row(layer).scale,
          .rounding = trace.header().rounding == Rounding::model_dtype
                          ? std::optional(trace.shape().dtype)
                          : std::nullopt,
          .threshold16 = request_threshold16(threshold),
          .softcap = trace.row(layer).softcap,
          .window = trace.row(layer).window};
}

void rotate_original(const RopeTable& rope, const HeadArithmetic& arithmetic, const float* x,
                     std::uint32_t head_size, std::uint32_t position, float* y) {
  rotate_rounded(rope, x, head_size, position, arithmetic.rounding, y);
}

ResolvedConfig resolve(const CacheConfig& config, const std::vector<Segment>& segments,
                       std::uint32_t sequence, const CacheShape& model) {
  const std::uint32_t length =
      segments.empty() ? 0 : segments.back().start + segments.back().tokens;
  const bool begins = !segments.empty() && segments.front().kind == SegmentKind::prompt;
  ResolvedConfig resolved =
      resolve(begins ? config.at_prompt(segments.front().tokens) : config, length, sequence, model);
  plan_appends(resolved, segments);
  return resolved;
}

void plan_appends(ResolvedConfig& resolved, const std::vector<Segment>& segments) {
  resolved.appends.clear();
  for (const Segment& segment : segments) {
    const bool is_prompt = segment.kind == SegmentKind::prompt;
    const bool dense = is_prompt && resolved.prefill.chunk == 0;
    const std::uint32_t chunk = dense ? segment.tokens : is_prompt ? resolved.prefill.chunk : 1;
    for (std::uint32_t done = 0; done < segment.tokens; done += chunk)
      resolved.appends.push_back({.first = segment.start + done,
                                  .tokens = std::min(chunk, segment.tokens - done),
                                  .decodes = !is_prompt});
    if (is_prompt && segment.tokens > 0) resolved.appends.back().ends_prompt = true;
    resolved.in_dense_prompt.resize(segment.start + segment.tokens, dense);
  }
}

}  // namespace kvlab
