// Makes the configuration of a slot cache from a model and a decoder's options.
#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

#include "engine/cuda/cache/evicting_cache.hpp"
#include "kernels/quantized/quantized_cache.hpp"
#include "policies/budgets/layer_budgets.hpp"
#include "policies/executor.hpp"

namespace kvlab {
namespace {

static_assert(kMaxDeviceTiers == kernels::kMaxDeviceTiers);

/// Whether a layer without a window has a soft cap. (A policy may evict tokens of such a layer.)
bool has_softcap(const ModelConfig& config) {
  return std::ranges::any_of(
      config.rows, [](const RowSpec& row) { return row.window == 0 && row.softcap != 0; });
}

/// Refuses caches that one launch cannot process together.
void check_caches(const ModelConfig& config, const std::vector<ResolvedConfig>& caches) {
  const auto& first = caches.front();
  for (const ResolvedConfig& cache : caches) {
    check_held(kCudaDecoder, cache, config.heads());
    if (cache.policy.centre != KeyCentre::none) check_centre(has_softcap(config), config.sinks);
    if (!side_by_side(cache, first))
      throw std::invalid_argument(
          "CUDA decoder: all sequences of a batch should have the same policy, features and "
          "positions");
  }
}

/// The properties of a compiled policy that memory depends on.
kernels::DevicePolicy device_policy(const CudaDecoderOptions& options) {
  const PolicyEntry& entry = *options.entry();
  if (entry.source)
    return {.needs = entry.info.needs,
            .evicts = entry.info.evicts,
            .weighted = entry.info.weighted,
            .slot_bytes = entry.slot_bytes,
            .params_bytes = entry.params_bytes};
  for (const kernels::DevicePolicy& policy : kernels::device_policies())
    if (policy.name == entry.info.name) return policy;
  throw std::invalid_argument(
      cpu_only(fmt::format("policy {}", entry.info.name), "it is not compiled for CUDA devices"));
}

kernels::SlotSequence sequence_of(const ResolvedConfig& cache) {
  const PolicyEntry& entry = *cache.policy.entry;
  kernels::SlotSequence sequence{.modifiers = cache.evicts() ? cache.policy.modifiers : Modifiers{},
                                 .params = std::vector<std::byte>(entry.params_bytes),
                                 .threshold16 = cache.threshold16(),
                                 .seed = cache.seed,
                                 .id = cache.sequence,
                                 .centre = cache.policy.centre.kind};
  entry.write_params(cache.policy.params, sequence.params.data());
  if (cache.shares_slots())
    sequence.share = [mean = cache.budget_tokens](std::span<const std::vector<EvictionKey>> heads) {
      return ada_budgets(heads, mean);
    };
  return sequence;
}

kernels::SlotPair pair_of(const ResolvedConfig& cache, std::uint32_t layer, std::uint32_t head,
                          std::uint32_t heads) {
  kernels::SlotPair pair{.budget = cache.budget_of(layer, head)};
  if (const auto* const planned = cache.planned_tiers(layer, pair.budget)) pair.tiers = *planned;
  const bool is_quantized = !pair.tiers.empty() && !pair.tiers.back().format.exact();
  if (is_quantized && cache.policy.centre == KeyCentre::constants) {
    const std::span<const float> centre = cache.policy.centre.constants->centre(layer, head);
    pair.centre.assign(centre.begin(), centre.end());
  }
  if (pair.budget == kNoBudget) return pair;
  pair.protected_tokens = resolve_protected_tokens(cache.policy, pair.budget);
  if (cache.shares_slots()) pair.max_budget = max_of_ada(pair.budget, heads);
  return pair;
}

}  // namespace

kernels::KvCacheConfig slots_config(const DeviceShape& model, const CudaDecoderOptions& options) {
  const ModelConfig& config = model.config();
  check_caches(config, options.caches);
  kernels::KvCacheConfig slots{.type = model.type(),
                               .query_heads = static_cast<int>(config.query_heads),
                               .kv_heads = static_cast<int>(config.kv_heads),
                               .head_size = static_cast<int>(config.head_size),
                               .other_ropes = config.has_windows(),
                               .max_tokens = options.slots,
                               .numbering = options.numbering(),
                               .features = options.features(static_cast<int>(config.hidden)),
                               .norms_keys = config.norms_each_head(),
                               .part = options.prefill_tokens,
                               .watched = options.watched};
  slots.weigh = [entry = options.entry()](std::span<const std::byte> params, std::span<float> to) {
    const std::uint32_t tail = entry->tail(params.data());
    for (std::uint32_t age = 0; age < to.size(); ++age)
      to[age] = age < tail ? entry->weight(age, params.data()) : 0.0f;
    return tail;
  };
  for (std::uint32_t table = 0; table < config.rope_tables(); ++table)
    slots.ropes.push_back(
        {config.rope_of_table(table).inv_freq, config.rope_of_table(table).factor});
  for (const ResolvedConfig& cache : options.caches) slots.sequences.push_back(sequence_of(cache));
  for (std::uint32_t layer = 0; layer < config.layers; ++layer) {
    const RowSpec& row = config.rows[layer];
    if (row.window > 0) continue;
    slots.layers.push_back({.number = layer,
                            .softmax_scale = row.scale,
                            .table = row.table,
                            .sinks = model.sinks(layer)});
    for (const ResolvedConfig& cache : options.caches)
      for (std::uint32_t head = 0; head < config.kv_heads; ++head)
        slots.pairs.push_back(pair_of(cache, layer, head, config.kv_heads));
  }
  const kernels::DevicePolicy policy = device_policy(options);
  slots.kernels = options.plain_eviction
                      ? kernels::plain_kernels(policy)
                      : kernels::kernels_for(slots, policy, kernels::PlainKernels::present);
  slots.workspaces = ObserverBranch::workspaces(slots.layers.size());
  return slots;
}

}  // namespace kvlab
