#include "sim/plan/plan_traces.hpp"

#include <fmt/format.h>

#include <cmath>
#include <stdexcept>

#include "policies/tiers/tier_plan.hpp"
#include "sim/head_view.hpp"
#include "traces/layer_ropes.hpp"

namespace kvlab {
namespace {

/// Number of keys whose mean is the centre of a trace.
std::uint32_t centre_keys_of(const TraceReader& trace) {
  const Segment& first = trace.segments().front();
  const std::uint32_t keys = first.kind == SegmentKind::prompt ? centre_keys(first.tokens) : 0;
  if (keys == 0)
    throw std::invalid_argument(
        fmt::format("--centre-out: {} does not begin with a prompt of at least two tokens, whose "
                    "keys are averaged; give a trace that does",
                    trace.directory().string()));
  return keys;
}

/// The centre of a KV head, as HostCache computes it with centre=prompt.
std::vector<float> centre_of(const TraceReader& trace, const LayerRopes& ropes, std::uint32_t layer,
                             std::uint32_t kv_head) {
  const std::size_t dim = trace.shape().head_size;
  const std::uint32_t count = centre_keys_of(trace);
  const HeadArithmetic arithmetic = arithmetic_of(trace, layer, 0);
  std::vector<float> keys(count * dim), rotated(dim);
  trace.read(Part::k, layer, kv_head, 0, count, keys.data());
  std::vector<CentreChannel> channels(dim);
  for (std::uint32_t i = 0; i < count; ++i) {
    rotate_original(ropes[layer], arithmetic, &keys[i * dim], trace.shape().head_size, i,
                    rotated.data());
    for (std::size_t d = 0; d < dim; ++d) channels[d].add(rotated[d]);
  }
  std::vector<float> centre;
  for (const CentreChannel& channel : channels) centre.push_back(channel.mean());
  return centre;
}

}  // namespace

std::vector<std::uint32_t> planned_layers(std::span<const TraceReader* const> traces) {
  const TraceReader& first = *traces.front();
  for (const TraceReader* trace : traces)
    if (trace->header().weights_xxh3 != first.header().weights_xxh3 ||
        trace->header().model != first.header().model || trace->shape() != first.shape() ||
        trace->layers_with_window(true) != first.layers_with_window(true))
      throw std::invalid_argument(
          fmt::format("--trace: {} and {} are of different models; plan for one model at a time",
                      first.directory().string(), trace->directory().string()));
  std::vector<std::uint32_t> layers;
  for (const std::uint32_t layer : first.layers_with_window(false))
    layers.push_back(first.shape().number(layer));
  if (layers.empty())
    throw std::invalid_argument(
        "every layer of the model has a sliding window; a plan is for layers without one");
  if (layers.size() > kMaxPlanLayers)
    throw std::invalid_argument(fmt::format("the model has {} layers; a plan can have at most {}",
                                            layers.size(), kMaxPlanLayers));
  check_quantized_heads(first.shape().head_size);
  return layers;
}

CentreConstants mean_centres(std::span<const TraceReader* const> traces) {
  const std::vector<std::uint32_t> numbers = planned_layers(traces);
  const ModelShape& shape = traces.front()->shape();
  std::vector<LayerRopes> ropes;
  for (const TraceReader* const trace : traces) ropes.emplace_back(*trace);
  CentreConstants mean{.kv_heads = shape.kv_heads, .head_size = shape.head_size};
  for (const std::uint32_t number : numbers)
    for (std::uint32_t kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
      std::vector<CentreChannel> channels(shape.head_size);
      for (std::size_t t = 0; t < traces.size(); ++t) {
        const std::vector<float> own =
            centre_of(*traces[t], ropes[t], shape.layer_of(number), kv_head);
        for (std::size_t d = 0; d < own.size(); ++d) channels[d].add(own[d]);
      }
      std::vector<float>& layer = mean.layers[number];
      for (const CentreChannel& channel : channels) {
        layer.push_back(channel.mean());
        if (!std::isfinite(layer.back()))
          throw std::invalid_argument(fmt::format(
              "--centre-out: the keys of layer {}, KV head {} have no finite mean; leave out the "
              "trace with such keys",
              number, kv_head));
      }
    }
  return mean;
}

}  // namespace kvlab
