#include "kernels/cache/slot_storage.hpp"

#include "kernels/host/transfer.hpp"

namespace kvlab::kernels {
namespace {

constexpr const char* kTables = "the cache's tables";

}  // namespace

SlotStorage::SlotStorage(cuda::Arena& arena, const SlotsConfig& config, const PairSlots& slots)
    : shape_(config.slot_cache(static_cast<int>(config.sequences.size()), slots.max_slots())),
      layers_(config.layers.data()),
      pairs_(slots.pairs()),
      params_bytes_(config.kernels.params_bytes) {
  const auto total = static_cast<std::size_t>(slots.total());
  const std::size_t sequences = config.sequences.size(), pairs = slots.all();
  tiers = TierStorage(arena, config, slots);
  const bool quantized = config.is_quantized();
  keys = arena.take<std::byte>(quantized ? 0 : total * config.key_bytes());
  values = arena.take<std::byte>(quantized ? 0 : total * config.key_bytes());
  if (quantized) keys = tiers.newest_keys, values = tiers.newest_values;
  positions = arena.take<std::uint32_t>(total);
  ages = arena.take<std::uint32_t>(config.numbering == KVLAB_SQUEEZED ? total : 0);
  states = arena.take<std::byte>(total * config.kernels.slot_bytes);
  features = arena.take<float>(total * static_cast<std::size_t>(config.features.count));
  unit_keys = arena.take<float>(has(config.features, KVLAB_KEY_COSINE)
                                    ? pairs * static_cast<std::size_t>(shape_.head_size)
                                    : 0);
  seen = arena.take<kvlab_observation>(config.watched && config.observes() ? total : 0);
  first_slots = arena.take<std::int64_t>(pairs);
  lengths = arena.take<std::int32_t>(pairs);
  next_slots = arena.take<std::int32_t>(pairs);
  rules = arena.take<kvlab_rule>(pairs);
  step_evict_at = compact_evict_at = never = nullptr;
  if (config.has_modifiers()) {
    step_evict_at = arena.take<std::uint32_t>(pairs);
    compact_evict_at = arena.take<std::uint32_t>(pairs);
    never = arena.take<std::uint32_t>(pairs);
  }
  params = arena.take<std::byte>(sequences * params_bytes_);
  thresholds = arena.take<std::uint32_t>(sequences);
  sequence_ids = arena.take<std::uint32_t>(sequences);
  seeds = arena.take<std::uint64_t>(sequences);
}

void SlotStorage::write_pairs(const PairSlots& slots, std::size_t first, std::size_t count) const {
  std::vector<kvlab_rule> own_rules;
  std::vector<std::uint32_t> of_steps, of_compactions;
  std::vector<std::int64_t> starts;
  for (std::size_t at = first; at < first + count; ++at) {
    const auto layer = static_cast<std::uint32_t>(at / pairs_);
    const std::size_t pair = at % pairs_;
    const ProtectedTokens protected_tokens = slots.protected_tokens(layer, pair);
    const Modifiers& modifiers = slots.modifiers(pair);
    const std::uint32_t budget = slots.budget(layer, pair);
    own_rules.push_back({.budget = budget,
                         .sinks = protected_tokens.sinks,
                         .recent = protected_tokens.recent,
                         .group_max = modifiers.group == Modifiers::Group::max});
    of_steps.push_back(modifiers.steps_evict() ? budget : kUnlimited);
    of_compactions.push_back(modifiers.evict_at(budget));
    starts.push_back(slots.first_slots()[at]);
  }
  cuda::write(rules + first, own_rules, kTables);
  cuda::write(first_slots + first, starts, kTables);
  if (!step_evict_at) return;
  cuda::write(step_evict_at + first, of_steps, kTables);
  cuda::write(compact_evict_at + first, of_compactions, kTables);
}

void SlotStorage::clear(const SlotsConfig& config, const PairSlots& slots) const {
  if (tiers.in_use()) tiers.clear(config, slots);
  const std::size_t pairs = slots.all();
  write_pairs(slots, 0, pairs);
  if (never) cuda::write(never, std::vector<std::uint32_t>(pairs, kUnlimited), kTables);
  std::vector<std::byte> all_params;
  std::vector<std::uint32_t> all_thresholds, ids;
  std::vector<std::uint64_t> all_seeds;
  for (const SlotSequence& sequence : config.sequences) {
    all_params.insert(all_params.end(), sequence.params.begin(), sequence.params.end());
    all_thresholds.push_back(sequence.threshold16);
    all_seeds.push_back(sequence.seed);
    ids.push_back(sequence.id);
  }
  if (unit_keys)
    cuda::write(unit_keys, std::vector<float>(pairs * static_cast<std::size_t>(shape_.head_size)),
                kTables);
  cuda::write(lengths, std::vector<std::int32_t>(pairs), kTables);
  cuda::write(next_slots, std::vector<std::int32_t>(pairs), kTables);
  cuda::write(params, all_params, kTables);
  cuda::write(thresholds, all_thresholds, kTables);
  cuda::write(sequence_ids, ids, kTables);
  cuda::write(seeds, all_seeds, kTables);
}

kvlab_cache SlotStorage::cache(std::uint32_t layer, int sequences) const {
  const std::size_t at = layer * pairs_;
  kvlab_cache cache = shape_;
  cache.sequences = sequences;
  cache.softmax_scale = layers_[layer].softmax_scale;
  cache.first_slot = first_slots + at;
  cache.keys = keys;
  cache.values = values;
  cache.positions = positions;
  cache.lengths = lengths + at;
  cache.next_slots = next_slots + at;
  cache.ages = ages;
  return cache;
}

kvlab_policy_state SlotStorage::policy(std::uint32_t layer) const {
  return {.states = states,
          .rules = rules + layer * pairs_,
          .params = params,
          .threshold16 = thresholds,
          .seeds = seeds,
          .sequence_ids = sequence_ids,
          .layer = layers_[layer].number,
          .seen = seen,
          .features = features,
          .evict_at = step_evict_at ? step_evict_at + layer * pairs_ : nullptr};
}

kvlab_cache SlotStorage::cache_of(std::uint32_t layer, int sequence) const {
  kvlab_cache one = cache(layer, 1);
  const std::ptrdiff_t pair = std::ptrdiff_t{sequence} * shape_.kv_heads;
  one.first_slot += pair;
  one.lengths += pair;
  one.next_slots += pair;
  return one;
}

kvlab_policy_state SlotStorage::policy_of(std::uint32_t layer, int sequence) const {
  kvlab_policy_state one = policy(layer);
  one.rules += std::ptrdiff_t{sequence} * shape_.kv_heads;
  one.params = params + static_cast<std::size_t>(sequence) * params_bytes_;
  one.threshold16 += sequence;
  one.seeds += sequence;
  one.sequence_ids += sequence;
  if (one.evict_at) one.evict_at += std::ptrdiff_t{sequence} * shape_.kv_heads;
  return one;
}

float* SlotStorage::unit_keys_of(std::uint32_t layer, int sequence) const {
  if (!unit_keys) return nullptr;
  const std::size_t pair = layer * pairs_ + static_cast<std::size_t>(sequence * shape_.kv_heads);
  return unit_keys + pair * static_cast<std::size_t>(shape_.head_size);
}

kvlab_policy_state SlotStorage::policy_of_compact(std::uint32_t layer, int sequence,
                                                  bool stays) const {
  kvlab_policy_state one = policy_of(layer, sequence);
  if (one.evict_at)
    one.evict_at = (stays ? never : compact_evict_at) + layer * pairs_ +
                   std::ptrdiff_t{sequence} * shape_.kv_heads;
  return one;
}

}  // namespace kvlab::kernels
