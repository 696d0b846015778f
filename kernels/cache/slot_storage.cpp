#include "kernels/cache/slot_storage.hpp"

#include "kernels/host/transfer.hpp"

namespace kvlab::kernels {
namespace {

constexpr const char* kTables = "the cache's tables";

}  // namespace

SlotStorage::SlotStorage(cuda::Arena& arena, const KvCacheConfig& config, const PairSlots& slots)
    : shape_(config.slot_cache(static_cast<int>(config.sequences.size()), slots.max_slots())),
      layers_(config.layers.data()),
      pages_(config.pages),
      first_head_(config.first_head),
      pairs_(slots.pairs()),
      key_bytes_(config.key_bytes()),
      slot_bytes_(config.kernels.slot_bytes),
      feature_count_(static_cast<std::size_t>(config.features.count)),
      params_bytes_(config.kernels.params_bytes) {
  const auto total = static_cast<std::size_t>(slots.total());
  const std::size_t sequences = config.sequences.size(), pairs = slots.all();
  tiers = TierStorage(arena, config, slots);
  const bool quantized = config.is_quantized(), owns_rows = !quantized && pages_.blocks == nullptr;
  keys = arena.take<std::byte>(owns_rows ? total * config.key_bytes() : 0);
  values = arena.take<std::byte>(owns_rows ? total * config.key_bytes() : 0);
  if (quantized) keys = tiers.newest_keys, values = tiers.newest_values;
  positions = arena.take<std::uint32_t>(total);
  ages = arena.take<std::uint32_t>(config.numbering == KVLAB_CACHE_POSITIONS ? total : 0);
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

void SlotStorage::write_pairs(const PairSlots& slots, std::size_t first, std::size_t count,
                              cudaStream_t stream) const {
  std::vector<kvlab_rule> own_rules;
  std::vector<std::uint32_t> step_limits, compaction_limits;
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
    step_limits.push_back(modifiers.steps_evict() ? budget : kUnlimited);
    compaction_limits.push_back(modifiers.evict_at(budget));
    starts.push_back(slots.first_slots()[at]);
  }
  cuda::enqueue_write(rules + first, own_rules, stream, kTables);
  cuda::enqueue_write(first_slots + first, starts, stream, kTables);
  if (!step_evict_at) return;
  cuda::enqueue_write(step_evict_at + first, step_limits, stream, kTables);
  cuda::enqueue_write(compact_evict_at + first, compaction_limits, stream, kTables);
}

void SlotStorage::write_settings(std::size_t first_sequence, std::span<const SlotSequence> settings,
                                 cudaStream_t stream) const {
  std::vector<std::byte> all_params;
  std::vector<std::uint32_t> all_thresholds, ids;
  std::vector<std::uint64_t> all_seeds;
  for (const SlotSequence& sequence : settings) {
    all_params.insert(all_params.end(), sequence.params.begin(), sequence.params.end());
    all_thresholds.push_back(sequence.threshold16);
    all_seeds.push_back(sequence.seed);
    ids.push_back(sequence.id);
  }
  cuda::enqueue_write(params + first_sequence * params_bytes_, all_params, stream, kTables);
  cuda::enqueue_write(thresholds + first_sequence, all_thresholds, stream, kTables);
  cuda::enqueue_write(sequence_ids + first_sequence, ids, stream, kTables);
  cuda::enqueue_write(seeds + first_sequence, all_seeds, stream, kTables);
}

void SlotStorage::initialize(const KvCacheConfig& config, const PairSlots& slots,
                             cudaStream_t stream) const {
  if (tiers.in_use()) tiers.initialize(config, slots, stream);
  if (never)
    cuda::enqueue_write(never, std::vector<std::uint32_t>(slots.all(), kUnlimited), stream,
                        kTables);
}

void SlotStorage::start(const PairSlots& slots, std::size_t first_sequence,
                        std::span<const SlotSequence> settings, cudaStream_t stream) const {
  const auto heads = static_cast<std::size_t>(shape_.kv_heads),
             head_size = static_cast<std::size_t>(shape_.head_size);
  const std::size_t count = settings.size() * heads;
  for (std::size_t first = first_sequence * heads; first < slots.all(); first += pairs_) {
    write_pairs(slots, first, count, stream);
    cuda::enqueue_zeros(lengths + first, count, stream, kTables);
    cuda::enqueue_zeros(next_slots + first, count, stream, kTables);
    if (unit_keys)
      cuda::enqueue_zeros(unit_keys + first * head_size, count * head_size, stream, kTables);
    if (tiers.in_use()) tiers.start(first, count, stream);
  }
  write_settings(first_sequence, settings, stream);
}

void SlotStorage::copy(const PairSlots& slots, std::size_t from, std::size_t to,
                       const SlotSequence& settings, cudaStream_t stream) const {
  const auto heads = static_cast<std::size_t>(shape_.kv_heads),
             head_size = static_cast<std::size_t>(shape_.head_size);
  for (std::uint32_t layer = 0; layer * pairs_ < slots.all(); ++layer) {
    const PairSlots::Range source = slots.range(layer, from), target = slots.range(layer, to);
    // For a sequence, copy_slots() copies `width` elements of each slot, and copy_pairs() `width`
    // elements of each pair.
    const auto copy_slots = [&](auto* array, std::size_t width) {
      if (array != nullptr && width > 0)
        cuda::copy(array + static_cast<std::size_t>(target.first) * width,
                   array + static_cast<std::size_t>(source.first) * width,
                   static_cast<std::size_t>(source.count) * width, stream);
    };
    const std::size_t first = layer * pairs_ + from * heads, to_first = layer * pairs_ + to * heads;
    const auto copy_pairs = [&](auto* array, std::size_t width = 1) {
      if (array != nullptr)
        cuda::copy(array + to_first * width, array + first * width, heads * width, stream);
    };
    if (tiers.in_use()) {
      tiers.copy(first, to_first, heads, stream);
      copy_slots(tiers.row_of_slot, 1);
    } else {  // keys and values are null, and not copied, if they are in the caller's blocks
      copy_slots(keys, key_bytes_);
      copy_slots(values, key_bytes_);
    }
    copy_slots(positions, 1);
    copy_slots(ages, 1);
    copy_slots(states, slot_bytes_);
    copy_slots(features, feature_count_);
    copy_pairs(unit_keys, head_size);
    copy_pairs(lengths);
    copy_pairs(next_slots);
    write_pairs(slots, to_first, heads, stream);
  }
  write_settings(to, {&settings, 1}, stream);
}

kvlab_cache_view SlotStorage::cache(std::uint32_t layer, int sequences) const {
  const std::size_t at = layer * pairs_;
  kvlab_cache_view cache = shape_;
  cache.sequences = sequences;
  cache.softmax_scale = layers_[layer].softmax_scale;
  cache.first_slot = first_slots + at;
  cache.keys = pages_.blocks ? layers_[layer].keys : keys;
  cache.values = pages_.blocks ? layers_[layer].values : values;
  cache.pages = pages_;
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
          .first_head = first_head_,
          .seen = seen,
          .features = features,
          .evict_at = step_evict_at ? step_evict_at + layer * pairs_ : nullptr};
}

kvlab_cache_view SlotStorage::cache_of(std::uint32_t layer, int sequence) const {
  kvlab_cache_view one = cache(layer, 1);
  const std::ptrdiff_t pair = std::ptrdiff_t{sequence} * shape_.kv_heads;
  one.first_slot += pair;
  one.lengths += pair;
  one.next_slots += pair;
  if (one.pages.blocks)
    one.pages.blocks += (one.pages.by_pair != 0 ? pair : sequence) * one.pages.max_blocks;
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
