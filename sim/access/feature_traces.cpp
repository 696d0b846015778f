#include "sim/access/feature_traces.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

#include "policies/budgets/budget.hpp"
#include "sim/head_view.hpp"

namespace kvlab {
namespace {

void check(const TraceReader& trace, const std::vector<std::string>& names,
           const CacheShape& model) {
  const auto refuse = [&](const std::string& what) {
    throw std::invalid_argument(
        fmt::format("--features: the trace {} {}", trace.directory().string(), what));
  };
  const ModelShape& shape = trace.shape();
  const std::size_t layers = trace.layers_with_window(false).size();
  const std::uint32_t own = model.policy_layers().layers;
  if (layers != own || shape.kv_heads != model.kv_heads || shape.head_size != model.head_size)
    refuse(fmt::format(
        "has {} layers without a window, {} KV heads and head size {}, but the model has "
        "{}, {} and {}; capture the trace from this model",
        layers, shape.kv_heads, shape.head_size, own, model.kv_heads, model.head_size));
  for (const std::string& name : names)
    if (!trace.has_feature(name))
      refuse(fmt::format(
          "has no feature {}; python -m kvlab.hf features or Trace.add_feature adds it", name));
}

}  // namespace

FeatureTraces::FeatureTraces(const std::vector<std::string>& paths, unsigned threads) {
  for (const std::string& path : paths) traces_.push_back(open_verified_trace(path, threads));
}

FeatureReader FeatureTraces::reader_of(std::span<const std::int32_t> prompt,
                                       std::vector<std::string> names,
                                       const CacheShape& model) const {
  const auto trace = std::ranges::find_if(traces_, [&](const TraceReader& one) {
    return one.tokens() >= prompt.size() &&
           std::equal(prompt.begin(), prompt.end(), one.ids().begin());
  });
  if (trace == traces_.end())
    throw std::invalid_argument(
        fmt::format("--features: none of the {} traces begins with the prompt of {} tokens; "
                    "capture exactly this text",
                    traces_.size(), prompt.size()));
  check(*trace, names, model);
  return [&own = *trace, names = std::move(names)](std::uint32_t layer, std::uint32_t kv_head,
                                                   FeaturesByName& to) {
    const std::uint32_t index = own.shape().layer_of(layer);
    check_head(own, index, kv_head);
    add_trace_features(own, index, kv_head, names, true, to);
  };
}

std::string FeatureTraces::xxh3() const {
  std::string all;
  for (const TraceReader& trace : traces_) all += trace.hash();
  return all;
}

}  // namespace kvlab
