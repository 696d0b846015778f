// A decode step of a KvCache: each sequence's new token takes the slot of the token that is
// evicted.
#include <algorithm>

#include "kernels/cache/kv_cache.hpp"
#include "kernels/host/transfer.hpp"

namespace kvlab::kernels {

using cuda::check;

void KvCache::reserve_for_steps() {
  for (const SlotSequence& sequence : config_.sequences)
    if (!sequence.modifiers.steps_evict()) reserve();
}

void KvCache::before_token(int sequence, std::uint32_t fed, LayerRange layers) {
  stepped_[static_cast<std::size_t>(sequence)] = true;
  if (!counts(sequence)) return;
  if (!settings(sequence).modifiers.steps_evict()) evict_to_budget(sequence, fed, false, layers);
  each_head(sequence, layers, [&](std::uint32_t layer, std::size_t pair) {
    Counts& own = counts_of(layer, pair);
    own.live -= surplus(layer, pair, false);  // the step itself evicts these
    own.append(1);
    own.fed = fed + 1;
    append_to_tiers(layer, pair, 1);
    count_bytes(layer, pair);
  });
}

RopeWriteArgs KvCache::write(std::uint32_t layer, const StepRows& rows) const {
  RopeWriteArgs args{};
  args.cache = cache_of(layer, rows);
  args.sequences = work_->iota;
  args.now = rows.now;
  if (is_quantized()) {  // store_in_tiers() writes the keys and values
    const TierStorage& tiers = storage_->tiers;
    args.cache.first_slot = tiers.newest + std::ptrdiff_t{rows.first} * config_.kv_heads;
    args.cache.next_slots = tiers.nothing;
    args.cache.positions = nullptr;
  }
  args.q = work_->q;
  args.plain_k = work_->plain_k;
  if (config_.numbering != KVLAB_CACHE_POSITIONS)
    rotate(rows.ropes, config_.layers[layer].table, args);
  return args;
}

void KvCache::store_in_tiers(std::uint32_t layer, const StepRows& rows) const {
  if (is_quantized())
    check(store_newest(cache_of(layer, rows), quantized_cache_of(layer, rows), rows.now, stream_),
          "the newest tokens");
}

EvictingAttentionArgs KvCache::step(std::uint32_t layer, const StepRows& rows,
                                    const AttendedRows& to) const {
  const SlotLayer& own = config_.layers[layer];
  const SlotRope& rope = config_.ropes[own.table];
  EvictingAttentionArgs args{{.cache = cache_of(layer, rows),
                              .policy = storage_->policy_of(layer, rows.first),
                              .numbering = config_.numbering,
                              .now = rows.now,
                              .q = work_->q,
                              .inv_freq = inv_freq(own.table),
                              .rotated = rope.rotated_dims(),
                              .rope_factor = rope.factor,
                              .out = to.out,
                              .lse = to.lse,
                              .settled = 1}};
  if (is_quantized()) args.quantized_cache = &quantized_cache_of(layer, rows);
  args.sinks = own.sinks;
  return args;
}

void KvCache::compute_features(std::uint32_t layer, const StepRows& rows,
                               const AttendedRows& to) const {
  if (config_.features.count == 0) return;
  const AttendedRows keys = attach_keys(to);
  FeatureArgs args{config_.features};
  args.cache = cache_of(layer, rows);
  args.slots = args.cache.next_slots;
  args.tokens = 1;
  args.now = rows.now;
  args.keys = keys.plain_keys;
  args.key_row = static_cast<std::int64_t>(keys.key_row);
  args.unit_keys = storage_->unit_keys_of(layer, rows.first);
  args.to = storage_->features;
  args.output = config_.layers[layer].output;
  if (is_quantized()) args.values = quantized_cache_of(layer, rows).newest_values;
  check(make_features(args, stream_), "features");
}

}  // namespace kvlab::kernels
