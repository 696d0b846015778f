// Eviction of a KvCache outside of steps. It moves the kept tokens, in place or from the append
// memory, and splits slots among KV heads after a prompt.
#include <algorithm>

#include "kernels/cache/kv_cache.hpp"
#include "kernels/host/transfer.hpp"

namespace kvlab::kernels {

using cuda::check;

std::uint32_t KvCache::surplus(std::uint32_t layer, std::size_t pair, bool after_prompt) const {
  return slots_.modifiers(pair).surplus(counts_of(layer, pair).live, slots_.budget(layer, pair),
                                        after_prompt);
}

/// Number of tokens that are still live when new tokens are appended after `fed` tokens. The new
/// tokens are not counted.
std::uint32_t KvCache::older(int sequence, std::uint32_t layer, std::size_t pair,
                             std::uint32_t fed) const {
  return counts(sequence) ? counts_of(layer, pair).live : slots_.older(layer, pair, fed);
}

void KvCache::modify(kvlab_compact_args& args, int sequence, bool after_prompt) const {
  const Modifiers& own = settings(sequence).modifiers;
  args.by_layer = own.scope == Modifiers::Scope::layer;
  args.smooth = own.smooths(after_prompt) ? own.smooth : 0;
  args.pool_max = own.pool == Modifiers::Pool::max;
}

/// Evicts tokens in place if the cache is over budget, before more tokens are appended after `fed`
/// tokens.
void KvCache::evict_to_budget(int sequence, std::uint32_t fed, bool after_prompt,
                              LayerRange layers) {
  bool moves = false;
  each_head(sequence, layers, [&](std::uint32_t layer, std::size_t pair) {
    moves |= surplus(layer, pair, after_prompt) > 0 ||
             (is_quantized() && tiers_of(layer, pair)
                                    .needs_eviction(slots_.modifiers(pair),
                                                    slots_.budget(layer, pair), after_prompt));
  });
  if (!moves) return;
  reserve();  // may throw, so it comes before the counts change
  each_head(sequence, layers, [&](std::uint32_t layer, std::size_t pair) {
    count_evictions_of(layer, pair, after_prompt);
  });
  copy_nothing(fed);
  for (std::uint32_t layer = layers.first; layer < end_of(layers); ++layer) {
    compact_in_place(sequence, layer, fed, after_prompt);
    number(storage_->cache_of(layer, sequence));
  }
}

void KvCache::copy_nothing(std::uint32_t fed) const {
  const Appended nothing{fed, 0};
  copy_to_device(work_->nothing, &nothing, 1);
}

kvlab_compact_args KvCache::to_slots(const AppendMemory& memory, int sequence, std::uint32_t layer,
                                     const Appended* appended, bool stays) const {
  kvlab_compact_args args{.from = memory.cache,
                          .to = storage_->cache_of(layer, sequence),
                          .policy = storage_->policy_of_compact(layer, sequence, stays),
                          .to_states = storage_->states,
                          .now = &appended->now,
                          .appended = &appended->tokens,
                          .workspace = scratch_->compact_workspace,
                          .to_features = storage_->features};
  args.policy.states = memory.states;
  args.policy.features = memory.features;
  return args;
}

/// Compacts a layer's slots in place. Tokens on tiers are first copied to the append memory.
void KvCache::compact_in_place(int sequence, std::uint32_t layer, std::uint32_t fed,
                               bool after_prompt) const {
  const AppendMemory& memory = compaction_memory();
  kvlab_compact_args args = to_slots(memory, sequence, layer, work_->nothing, false);
  if (is_quantized()) {
    take_live(memory, sequence, layer, fed, true);
  } else {
    args.from = args.to;
    args.policy.states = storage_->states;
    args.policy.features = storage_->features;
  }
  compact(memory, args, sequence, layer, after_prompt);
}

void KvCache::take_live(const AppendMemory& memory, int sequence, std::uint32_t layer,
                        std::uint32_t fed, bool stays) const {
  copy_nothing(fed);  // steps between the parts of an append may have overwritten work_->nothing
  compact(memory,
          {.from = storage_->cache_of(layer, sequence),
           .to = memory.cache,
           .policy = storage_->policy_of_compact(layer, sequence, stays),
           .to_states = memory.states,
           .now = &work_->nothing->now,
           .appended = &work_->nothing->tokens,
           .workspace = scratch_->compact_workspace,
           .to_features = memory.features},
          sequence, layer, false);
}

void KvCache::compact(const AppendMemory& memory, kvlab_compact_args args, int sequence,
                      std::uint32_t layer, bool after_prompt) const {
  modify(args, sequence, after_prompt);
  if (!is_quantized()) return compact_rows(args, scratch_->ranks);
  const QuantizedCache quantized_cache = storage_->tiers.quantized_cache(layer, sequence);
  const auto move = args.to.keys == memory.cache.keys ? read_from_tiers : compact_to_tiers;
  check(move(config_.kernels, args, quantized_cache, memory.staged, stream_),
        "tokens and their tiers");
}

void KvCache::compact_rows(const kvlab_compact_args& args, std::uint64_t* ranks) const {
  constexpr const char* kWhat = "a compaction";
  if (!config_.ranks.gather || args.by_layer == 0)
    return check(kernels::compact(config_.kernels, args, stream_), kWhat);
  const std::size_t count = static_cast<std::size_t>(args.from.sequences) *
                            static_cast<std::size_t>(args.from.kv_heads) *
                            static_cast<std::size_t>(args.from.max_slots);
  std::uint64_t* const all = ranks + count;
  check(rank_by_age(config_.kernels, args, ranks, stream_), kWhat);
  config_.ranks.gather(ranks, all, count, stream_);
  check(keep_by_ranks(config_.kernels, args, all, config_.ranks.devices, stream_), kWhat);
}

bool KvCache::centres_keys(std::uint32_t layer, int sequence) const {
  if (!is_quantized() || settings(sequence).centre == KeyCentre::none) return false;
  const auto pair = static_cast<std::size_t>(sequence) * config_.kv_heads;
  return !slots_.tiers(layer, pair).back().format.exact();
}

std::uint64_t KvCache::bytes_on_tiers(std::uint32_t layer, std::size_t pair) const {
  const TierCounts& tiers = tier_counts_[layer * slots_.pairs() + pair];
  const auto sequence = static_cast<int>(pair) / config_.kv_heads;
  std::uint64_t bytes = 0;
  if (centres_keys(layer, sequence))
    bytes += static_cast<std::size_t>(config_.head_size) * sizeof(float);
  for (std::size_t r = 0; r < tiers.tier_plan().size(); ++r) {
    const KvFormat& format = tiers.tier_plan()[r].format;
    bytes += tiers.on(r) * (format.exact() ? 2 * config_.key_bytes()
                                           : format.block_bytes() * halves() * 2 / kQuantBlock);
  }
  return bytes;
}

/// Updates the peak bytes after tokens were appended.
void KvCache::count_bytes(std::uint32_t layer, std::size_t pair) {
  if (!is_quantized()) return;
  std::uint64_t& max_bytes = counts_of(layer, pair).max_bytes;
  max_bytes = std::max(max_bytes, bytes_on_tiers(layer, pair));
}

/// Counts an append of `tokens` tokens, which evicts to the budget first.
void KvCache::count_append(int sequence, std::uint32_t layer, std::uint32_t tokens) {
  each_pair(sequence, [&](std::size_t pair) {
    Counts& own = counts_of(layer, pair);
    own.live -= surplus(layer, pair, false);
    own.append(tokens);
    own.fed += tokens;
    append_to_tiers(layer, pair, tokens);
  });
}

/// Counts the evictions after an append.
void KvCache::count_evictions(int sequence, std::uint32_t layer, bool after_prompt) {
  each_pair(sequence, [&](std::size_t pair) {
    count_evictions_of(layer, pair, after_prompt);
    count_bytes(layer, pair);
  });
}

void KvCache::count_evictions_of(std::uint32_t layer, std::size_t pair, bool after_prompt) {
  counts_of(layer, pair).live -= surplus(layer, pair, after_prompt);
  if (is_quantized())
    tiers_of(layer, pair)
        .evict_to_budget(slots_.modifiers(pair), slots_.budget(layer, pair), after_prompt);
}

/// Counts the tokens that are appended to tiers, after an eviction to the budget.
void KvCache::append_to_tiers(std::uint32_t layer, std::size_t pair, std::uint32_t tokens) {
  if (!is_quantized()) return;
  TierCounts& tiers = tiers_of(layer, pair);
  tiers.evict_to_budget(slots_.modifiers(pair), slots_.budget(layer, pair), false);
  tiers.append(tokens);
}

void KvCache::end_prompt(int sequence, std::uint32_t fed, LayerRange layers) {
  if (settings(sequence).share) {
    if (shared_when_[static_cast<std::size_t>(sequence)] != fed) share_slots_of_live(sequence, fed);
  } else if (settings(sequence).modifiers != Modifiers{}) {
    evict_to_budget(sequence, fed, true, layers);
  }
}

// --- Shared slots --------------------------------------------------------------------------------

/// After a prompt: splits a layer's slots among its KV heads by the ranks of their tokens, and
/// moves the live tokens to these slots. `memory` must hold all live tokens. Synchronizes. Returns
/// how many tokens were live before the split, [kv_head].
std::vector<std::int32_t> KvCache::share_slots(const AppendMemory& memory, int sequence,
                                               std::uint32_t layer, std::uint32_t fed) {
  constexpr const char* kWhat = "sharing slots";
  const Appended ended{fed, 0};
  copy_to_device(work_->ended, &ended, 1);
  kvlab_compact_args args = to_slots(memory, sequence, layer, work_->ended, false);
  modify(args, sequence, true);
  check(rank_tokens(config_.kernels, args, stream_), kWhat);

  const auto heads = static_cast<std::size_t>(config_.kv_heads),
             row = static_cast<std::size_t>(memory.cache.max_slots);
  auto lengths = cuda::read(memory.cache.lengths, heads, stream_, kWhat);
  const auto positions = cuda::read(memory.cache.positions, heads * row, stream_, kWhat);
  const auto ranks = cuda::read(ranks_of(args), heads * row, stream_, kWhat);
  const std::size_t first = static_cast<std::size_t>(sequence) * heads;
  std::vector<std::vector<EvictionKey>> keys(heads);
  for (std::size_t head = 0; head < heads; ++head) {
    const ProtectedTokens protected_tokens = slots_.protected_tokens(layer, first + head);
    const auto live = static_cast<std::size_t>(lengths[head]);
    for (std::size_t i = head * row; i < head * row + live; ++i)
      keys[head].push_back(
          {protected_tokens.protection(positions[i], fed), ranks[i], positions[i]});
  }
  slots_.share(layer, static_cast<std::size_t>(sequence), settings(sequence).share(keys));
  storage_->write_pairs(slots_, layer * slots_.pairs() + first, heads, stream_);
  check(kernels::compact(config_.kernels, args, stream_), kWhat);
  number(args.to);
  count_evictions(sequence, layer, true);
  shared_when_[static_cast<std::size_t>(sequence)] = fed;
  return lengths;
}

/// Splits slots after a prompt whose last token was fed by a step. It first copies the live tokens
/// to append memory, where share_slots() expects them.
void KvCache::share_slots_of_live(int sequence, std::uint32_t fed) {
  reserve();
  for (std::uint32_t layer = 0; layer < config_.layers.size(); ++layer) {
    take_live(compaction_memory(), sequence, layer, fed, true);
    share_slots(compaction_memory(), sequence, layer, fed);
  }
}

}  // namespace kvlab::kernels
