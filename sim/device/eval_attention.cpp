#include "sim/device/eval_attention.hpp"

#include <algorithm>

#include "kernels/host/transfer.hpp"
#include "traces/base/numeric/dtype.hpp"
#include "traces/base/parallel.hpp"

namespace kvlab {
namespace {

DeviceSweep sweep_of(const HeadTaskPlan& plan, std::span<const ResolvedConfig* const> configs) {
  return {configs, plan.tokens, false, false, static_cast<int>(plan.shape.kv_heads)};
}

HeadTaskSizes outputs_alone(const HeadTaskPlan& plan, const DeviceSweep& sweep) {
  HeadTaskSizes sizes = sizes_of(plan, sweep, 1);
  sizes.metrics = false;
  return sizes;
}

/// The head tasks of all layers. In each layer, every KV head of every configuration is a head
/// task.
std::vector<HeadTask> tasks_of(const HeadTaskPlan& plan, std::size_t configs) {
  std::vector<HeadTask> tasks;
  for (std::uint32_t layer = 0; layer < plan.shape.layers; ++layer)
    for (std::size_t c = 0; c < configs; ++c)
      for (std::uint32_t head = 0; head < plan.shape.kv_heads; ++head)
        tasks.push_back({layer, head});
  return tasks;
}

std::uint64_t kv_bytes_peak_of(const ResolvedConfig& config, const ModelShape& shape) {
  ResolvedConfig window;  // the configuration with which a layer with a window is counted
  window.appends = config.appends;
  std::uint64_t sum = 0;
  for (std::uint32_t layer = 0; layer < shape.layers; ++layer)
    for (std::uint32_t head = 0; head < shape.kv_heads; ++head)
      sum += live_counts(config.window_of(layer) > 0 ? window : config, layer,
                         config.budget_of(layer, head), bytes_of(shape.dtype))
                 .bytes_peak;
  return sum * shape.head_size / kQuantBlock;
}

}  // namespace

EvalAttention::EvalAttention(const HeadTaskPlan& plan,
                             std::span<const ResolvedConfig* const> configs, const Tables& tables,
                             unsigned threads, cuda::Products& product, Streams& streams,
                             Walks& walks)
    : plan_(plan),
      configs_(configs),
      threads_(threads),
      sweep_(sweep_of(plan, configs)),
      tasks_(plan, sweep_, outputs_alone(plan, sweep_), tasks_of(plan, configs.size()), tables,
             product, streams, plan.shape.layers),
      walks_(walks),
      count_(configs.size() * plan.shape.kv_heads) {
  for (const ResolvedConfig* const config : configs)
    kv_bytes_peak_.push_back(kv_bytes_peak_of(*config, plan.shape));
  walks_.load(tasks_.walks(), threads);
}

std::size_t EvalAttention::bytes_of_config(const HeadTaskPlan& plan,
                                           std::span<const ResolvedConfig* const> configs) {
  return plan.shape.kv_heads * bytes_of(outputs_alone(plan, sweep_of(plan, configs)), 1);
}

void EvalAttention::send_features(std::uint32_t layer) {
  const HeadTaskSizes& s = tasks_.sizes();
  const std::size_t heads = plan_.shape.kv_heads, head_stride = s.tokens * s.dim,
                    task_values = s.tokens * s.token_features;
  std::vector<float> rows(2 * heads * head_stride), features(heads * task_values);
  for (std::size_t c = 0; c < configs_.size(); ++c) {
    const auto& names = configs_[c]->policy.features;
    if (names.empty()) continue;
    cuda::check(cudaStreamSynchronize(tasks_.stream()), "the end-to-end evaluation");
    const auto fetch = [&](const std::byte* from, float* to) {
      const std::size_t bytes = heads * head_stride * s.element_bytes;
      const auto stored = cuda::download(std::span(from + c * bytes, bytes));
      to_float(plan_.shape.dtype, stored.data(), heads * head_stride, to);
    };
    fetch(keys(), rows.data());
    fetch(values(), rows.data() + heads * head_stride);
    parallel_for(heads, threads_, [&](std::size_t head) {
      const float* const keys = rows.data() + head * head_stride;
      const HeadView view{
          .tokens = plan_.tokens,
          .head_size = static_cast<std::uint32_t>(s.dim),
          .k = keys,
          .v = keys + heads * head_stride,
          .kv_token_stride = s.dim,
          .output = weights_of(plan_.output, layer, static_cast<std::uint32_t>(head))};
      const TokenFeatures own(names, view, configs_[c]->appends);
      std::copy_n(own.from(0), view.tokens * names.size(), features.data() + head * task_values);
    });
    cuda::write(tasks_.parts().features + c * heads * task_values, features,
                "the end-to-end evaluation");
  }
}

void EvalAttention::attend(std::uint32_t layer, const std::byte* queries, std::byte* outputs) {
  const HeadTaskSizes& s = tasks_.sizes();
  const kernels::Type type = tasks_.parts().block.shape.type;
  const std::size_t head_stride = s.dim * s.element_bytes, key_stride = s.tokens * head_stride,
                    width = plan_.shape.query_heads;
  for (std::size_t task = 0; task < count_; ++task) {
    const std::size_t config = task / plan_.shape.kv_heads, kv_head = task % plan_.shape.kv_heads;
    tasks_.take_keys({keys() + task * key_stride, type, static_cast<std::int64_t>(s.dim)}, task);
    for (std::uint32_t head = 0; head < s.group; ++head)
      tasks_.take_queries(
          {queries + (config * s.tokens * width + kv_head * s.group + head) * head_stride, type,
           static_cast<std::int64_t>(width * s.dim)},
          task, head);
  }
  tasks_.make_copies();
  send_features(layer);
  tasks_.clear();
  tasks_.set_layer(layer);
  const auto block = static_cast<std::uint32_t>(s.block);
  for (std::uint32_t first = 0; first < plan_.tokens; first += block)
    tasks_.replay_block(walks_, first, std::min(block, plan_.tokens - first), outputs);
}

}  // namespace kvlab
