#include "engine/cuda/cache/slot_storage.hpp"

#include "kernels/host/transfer.hpp"

namespace kvlab {
namespace {

constexpr const char* kTables = "the cache's tables";

}  // namespace

SlotStorage::SlotStorage(cuda::Arena& arena, const DeviceShape& model, const PairSlots& slots,
                         const CudaDecoderOptions& options)
    : config_(&model.config()),
      shape_(model.slot_cache(options.sequences, slots.most())),
      pairs_(slots.pairs()),
      params_bytes_(options.entry()->params_bytes) {
  const auto total = static_cast<std::size_t>(slots.total());
  const std::size_t sequences = options.caches.size(), pairs = slots.first_slots().size();
  rungs = RungStorage(arena, model, slots, options);
  keys = arena.take<std::byte>(options.coded() ? 0 : total * model.key_bytes());
  values = arena.take<std::byte>(options.coded() ? 0 : total * model.key_bytes());
  if (options.coded()) keys = rungs.newest_keys, values = rungs.newest_values;
  positions = arena.take<std::uint32_t>(total);
  ages = arena.take<std::uint32_t>(options.rotation() == KeyRotation::by_age ? total : 0);
  states = arena.take<std::byte>(total * options.entry()->slot_bytes);
  const kernels::ColumnList brought = options.columns();
  columns = arena.take<float>(total * static_cast<std::size_t>(brought.count));
  unit_keys = arena.take<float>(brought.has(BuiltInColumn::key_cosine)
                                    ? pairs * static_cast<std::size_t>(shape_.head_size)
                                    : 0);
  seen = arena.take<Observation>(options.watched && options.observes() ? total : 0);
  first_slots = arena.take<std::int64_t>(pairs);
  lengths = arena.take<std::int32_t>(pairs);
  next_slots = arena.take<std::int32_t>(pairs);
  rules = arena.take<kernels::PairRule>(pairs);
  step_room_at = shrink_room_at = never = nullptr;
  if (options.modified()) {
    step_room_at = arena.take<std::uint32_t>(pairs);
    shrink_room_at = arena.take<std::uint32_t>(pairs);
    never = arena.take<std::uint32_t>(pairs);
  }
  params = arena.take<std::byte>(sequences * params_bytes_);
  thresholds = arena.take<std::uint32_t>(sequences);
  sequence_ids = arena.take<std::uint32_t>(sequences);
  seeds = arena.take<std::uint64_t>(sequences);
}

void SlotStorage::write_pairs(const PairSlots& slots, std::size_t first, std::size_t count) const {
  std::vector<kernels::PairRule> own_rules;
  std::vector<std::uint32_t> of_steps, of_shrinks;
  std::vector<std::int64_t> starts;
  for (std::size_t at = first; at < first + count; ++at) {
    const auto layer = static_cast<std::uint32_t>(at / pairs_);
    const std::size_t pair = at % pairs_;
    const Guards guards = slots.guards(layer, pair);
    const Modifiers& modifiers = slots.modifiers(pair);
    const std::uint32_t budget = slots.budget(layer, pair);
    own_rules.push_back({.budget = budget,
                         .sinks = guards.sinks,
                         .recent = guards.recent,
                         .group_max = modifiers.group == Modifiers::Group::max});
    of_steps.push_back(modifiers.steps_make_room() ? budget : kernels::kUnlimited);
    of_shrinks.push_back(modifiers.room_at(budget));
    starts.push_back(slots.first_slots()[at]);
  }
  cuda::write(rules + first, own_rules, kTables);
  cuda::write(first_slots + first, starts, kTables);
  if (!step_room_at) return;
  cuda::write(step_room_at + first, of_steps, kTables);
  cuda::write(shrink_room_at + first, of_shrinks, kTables);
}

void SlotStorage::clear(const DeviceModel& model, const PairSlots& slots,
                        const CudaDecoderOptions& options) const {
  if (options.coded()) rungs.clear(model, slots, options.caches.size());
  const std::size_t pairs = slots.first_slots().size();
  write_pairs(slots, 0, pairs);
  if (never) cuda::write(never, std::vector<std::uint32_t>(pairs, kernels::kUnlimited), kTables);
  std::vector<std::byte> all_params(options.caches.size() * params_bytes_);
  std::vector<std::uint32_t> all_thresholds, ids;
  std::vector<std::uint64_t> all_seeds;
  for (std::size_t s = 0; s < options.caches.size(); ++s) {
    const ResolvedConfig& cache = options.caches[s];
    options.entry()->write_params(cache.policy.params, all_params.data() + s * params_bytes_);
    all_thresholds.push_back(cache.threshold16());
    all_seeds.push_back(cache.seed);
    ids.push_back(cache.sequence);
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

kernels::SlotCache SlotStorage::cache(std::uint32_t layer, int sequences) const {
  const std::size_t at = layer * pairs_;
  kernels::SlotCache cache = shape_;
  cache.sequences = sequences;
  cache.softmax_scale = config_->rows[layer].scale;
  cache.first_slot = first_slots + at;
  cache.keys = keys;
  cache.values = values;
  cache.positions = positions;
  cache.lengths = lengths + at;
  cache.next_slots = next_slots + at;
  cache.ages = ages;
  return cache;
}

kernels::PolicyState SlotStorage::policy(std::uint32_t layer) const {
  return {.states = states,
          .rules = rules + layer * pairs_,
          .params = params,
          .threshold16 = thresholds,
          .seeds = seeds,
          .sequence_ids = sequence_ids,
          .layer = layer,
          .seen = seen,
          .room_at = step_room_at ? step_room_at + layer * pairs_ : nullptr,
          .columns = columns};
}

kernels::SlotCache SlotStorage::cache_of(std::uint32_t layer, int sequence) const {
  kernels::SlotCache one = cache(layer, 1);
  const std::ptrdiff_t pair = std::ptrdiff_t{sequence} * shape_.kv_heads;
  one.first_slot += pair;
  one.lengths += pair;
  one.next_slots += pair;
  return one;
}

kernels::PolicyState SlotStorage::policy_of(std::uint32_t layer, int sequence) const {
  kernels::PolicyState one = policy(layer);
  one.rules += std::ptrdiff_t{sequence} * shape_.kv_heads;
  one.params += static_cast<std::size_t>(sequence) * params_bytes_;
  one.threshold16 += sequence;
  one.seeds += sequence;
  one.sequence_ids += sequence;
  if (one.room_at) one.room_at += std::ptrdiff_t{sequence} * shape_.kv_heads;
  return one;
}

float* SlotStorage::unit_keys_of(std::uint32_t layer, int sequence) const {
  if (!unit_keys) return nullptr;
  const std::size_t pair = layer * pairs_ + static_cast<std::size_t>(sequence * shape_.kv_heads);
  return unit_keys + pair * static_cast<std::size_t>(shape_.head_size);
}

kernels::PolicyState SlotStorage::policy_of_shrink(std::uint32_t layer, int sequence,
                                                   bool stays) const {
  kernels::PolicyState one = policy_of(layer, sequence);
  if (one.room_at)
    one.room_at = (stays ? never : shrink_room_at) + layer * pairs_ +
                  std::ptrdiff_t{sequence} * shape_.kv_heads;
  return one;
}

}  // namespace kvlab
