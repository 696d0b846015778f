#include "engine/checkpoint/weight_bytes.hpp"

#include <cmath>
#include <string_view>

namespace kvlab {
namespace {

/// Number of weights in a layer's attention: projections, biases, norms of q and k, sink logits.
double attention_elements(const ModelConfig& config) {
  const double head = config.head_size, q = config.query_heads * head, kv = config.kv_heads * head,
               hidden = config.hidden;
  double elements = hidden * (2 * q + 2 * kv);
  if (config.qkv_bias && !config.fused) elements += q + 2 * kv;
  if (config.output_bias) elements += hidden;
  if (config.qk_norm) elements += config.whole_qk_norm ? q + kv : 2 * head;
  if (config.sinks) elements += config.query_heads;
  return elements;
}

/// Number of weights in the matrices of one expert.
double expert_elements(const ModelConfig& config) {
  return 3.0 * config.experts.mlp * config.hidden;
}

double mlp_elements(const ModelConfig& config, std::uint32_t layer) {
  const double hidden = config.hidden, count = config.experts.count;
  if (!config.has_experts(layer)) {
    const double biases = config.mlp_bias && !config.fused ? 2.0 * config.mlp + hidden : 0;
    return 3.0 * config.mlp * hidden + biases;
  }
  // Stacked experts have biases, and so does their router.
  const double biases =
      config.experts.stacked ? count * (1 + 2.0 * config.experts.mlp + hidden) : 0;
  return count * (hidden + expert_elements(config)) + biases;
}

double norm_elements(const ModelConfig& config) {
  double norms = 0;
  for (const std::string_view name : {config.norms.pre_attention, config.norms.post_attention,
                                      config.norms.pre_mlp, config.norms.post_mlp})
    norms += name.empty() ? 0 : 1;
  return norms * config.hidden;
}

/// Expected number of experts of a layer that no sequence uses.
double unused_experts(const Experts& experts, std::uint32_t batch) {
  const double unused = 1 - static_cast<double>(experts.chosen) / experts.count;
  return experts.count * std::pow(unused, batch);
}

}  // namespace

double weight_bytes(const ModelConfig& config, std::size_t element_bytes) {
  const double embedding = static_cast<double>(config.vocab) * config.hidden;
  double elements = embedding * (config.tied_head ? 1 : 2) + config.hidden;
  for (std::uint32_t layer = 0; layer < config.layers; ++layer)
    elements += attention_elements(config) + mlp_elements(config, layer) + norm_elements(config);
  return elements * static_cast<double>(element_bytes);
}

double step_weight_bytes(const ModelConfig& config, std::size_t element_bytes,
                         std::uint32_t batch) {
  double unread = config.tied_head ? 0 : static_cast<double>(config.vocab) * config.hidden;
  for (std::uint32_t layer = 0; layer < config.layers; ++layer)
    if (config.has_experts(layer))
      unread += unused_experts(config.experts, batch) * expert_elements(config);
  return weight_bytes(config, element_bytes) - unread * static_cast<double>(element_bytes);
}

}  // namespace kvlab
