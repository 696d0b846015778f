// Appends many tokens to the caches of a KvCache. In each layer, queries attend to the append
// memory, which holds the live tokens and then the new tokens. After that, the kept tokens are
// moved to their slots.
#include <algorithm>

#include "kernels/cache/kv_cache.hpp"
#include "kernels/host/transfer.hpp"

namespace kvlab::kernels {

using cuda::check;

AppendMemory::AppendMemory(cuda::Arena& arena, const KvCacheConfig& config, std::uint32_t slots)
    : cache(config.slot_cache(1, static_cast<int>(slots))) {
  const auto heads = static_cast<std::size_t>(config.kv_heads), all = heads * slots;
  cache.keys = arena.take<std::byte>(all * config.key_bytes());
  cache.values = arena.take<std::byte>(all * config.key_bytes());
  cache.positions = arena.take<std::uint32_t>(all);
  cache.lengths = arena.take<std::int32_t>(heads);
  cache.next_slots = arena.take<std::int32_t>(heads);
  cache.first_slot = first_slots = arena.take<std::int64_t>(heads);
  states = arena.take<std::byte>(all * config.kernels.slot_bytes);
  if (config.features.count > 0) {
    features = arena.take<float>(all * static_cast<std::size_t>(config.features.count));
    plain_keys = arena.take<std::byte>(all * config.key_bytes());
  }
  if (config.numbering != KVLAB_ORIGINAL_POSITIONS)
    cache_position_keys = arena.take<std::byte>(all * config.key_bytes());
  if (config.observes()) seen = arena.take<kvlab_observation>(all);
  if (config.is_quantized()) {
    const std::size_t channels = all * 2 * static_cast<std::size_t>(config.head_size);
    staged.tiers = arena.take<std::int8_t>(all);
    staged.data = arena.take<std::uint8_t>(channels);
    staged.metadata = arena.take<std::uint32_t>(channels / kQuantBlock);
  }
}

AppendScratch::AppendScratch(cuda::Arena& arena, const KvCacheConfig& config, std::uint32_t slots) {
  if (config.kernels.weighted) weights = arena.take<float>(slots);
  if (config.observes()) {
    rows = arena.take<RowSoftmax>(std::size_t{config.part} *
                                  static_cast<std::size_t>(config.query_heads));
    observe_workspace = arena.take<std::byte>(kernels::observe_workspace(
        {.query_heads = config.query_heads, .queries = static_cast<int>(config.part)}));
  }
  const kvlab_cache_view cache = config.slot_cache(1, static_cast<int>(slots));
  compact_workspace = arena.take<std::byte>(kernels::compact_workspace(cache));
  ranks = arena.take<std::uint64_t>(config.gathered_ranks(cache));
}

std::uint64_t KvCache::append_bytes(const KvCacheConfig& config, std::uint32_t slots,
                                    std::uint32_t max_slots) {
  std::uint64_t bytes = cuda::Placed<AppendScratch>::bytes(config, slots) +
                        cuda::Placed<AppendMemory>::bytes(config, slots);
  if (config.interleaves_appends)
    bytes += (config.layers.size() - 1) * cuda::Placed<AppendMemory>::bytes(config, slots) +
             cuda::Placed<AppendMemory>::bytes(config, max_slots);
  return bytes;
}

void KvCache::reserve(std::uint32_t slots) {
  const auto max_slots = static_cast<std::uint32_t>(slots_.max_slots());
  slots = std::max(slots, max_slots);
  if (slots <= append_slots_) return;
  check(cudaStreamSynchronize(stream_), "an append");
  append_slots_ = 0;  // frees the old memory before the new memory is allocated
  memories_.clear();
  scratch_ = {};
  const auto add = [&](std::uint32_t count) {
    memories_.emplace_back("an append", config_, count);
    std::vector<std::int64_t> first;
    for (int head = 0; head < config_.kv_heads; ++head) first.push_back(std::int64_t{head} * count);
    cuda::write(memories_.back()->first_slots, first, "an append");
  };
  scratch_ = cuda::Placed<AppendScratch>("an append", config_, slots);
  for (std::size_t layer = 0; layer < (config_.interleaves_appends ? config_.layers.size() : 1);
       ++layer)
    add(slots);
  if (config_.interleaves_appends) add(max_slots);
  append_slots_ = slots;
}

void KvCache::begin(int sequence, std::uint32_t fed, std::uint32_t tokens, bool ends_prompt) {
  // If steps do not evict, the cache may be over budget now, and is then evicted to the budget
  // before the append. Otherwise the append's queries would see some tokens in the format of the
  // tier from which these tokens are demoted right after the append.
  if (is_quantized() && !settings(sequence).modifiers.steps_evict())
    evict_to_budget(sequence, fed, false, {});
  // With rotated keys the first append does not have to use cache positions, because no token has
  // been evicted yet.
  const bool uses_cache_positions = config_.numbering == KVLAB_CACHE_POSITIONS ||
                                    (config_.numbering == KVLAB_CACHE_POSITIONS_ROTATED && fed > 0);
  append_ = {sequence, fed, tokens, ends_prompt, uses_cache_positions};
  reserve(appended_slots());
  const Appended all{fed, tokens};
  copy_to_device(work_->appended, &all, 1);
  if (config_.kernels.weighted) copy_weights();
}

/// Number of slots that the live and the new tokens need together. If another append came between
/// two layers, some layers already have the new tokens, and need no slots.
std::uint32_t KvCache::appended_slots() const {
  std::uint32_t live = 0;
  each_head(append_.sequence, [&](std::uint32_t layer, std::size_t pair) {
    if (counts(append_.sequence) && counts_of(layer, pair).fed > append_.fed) return;
    live = std::max(live, older(append_.sequence, layer, pair, append_.fed));
  });
  return live + append_.tokens;
}

void KvCache::copy_weights() {
  std::vector<float> weights(append_.tokens);
  append_.tail = config_.weigh(settings(append_.sequence).params, weights);
  copy_to_device(scratch_->weights, weights.data(), weights.size());
}

RopeWriteArgs KvCache::write(std::uint32_t layer, const AppendChunk& part) {
  if (part.first == 0) begin_layer(layer);
  const AppendMemory& memory = append_memory(layer);
  RopeWriteArgs args{};
  args.sequences = work_->zeros;
  args.slots = work_->iota;
  // The slots of this part follow those of the earlier parts of the append.
  const std::size_t ahead = part.first * config_.key_bytes();
  args.cache = memory.cache;
  args.cache.keys = static_cast<std::byte*>(args.cache.keys) + ahead;
  args.cache.values = static_cast<std::byte*>(args.cache.values) + ahead;
  args.cache.next_slots = args.cache.lengths;  // new tokens follow the live ones
  args.q = work_->q;
  args.plain_k = work_->plain_k;
  if (config_.numbering != KVLAB_CACHE_POSITIONS)
    rotate(RopeRows::append, config_.layers[layer].table, args);
  return args;
}

/// Copies the live tokens to the append memory. If the last step has already chosen the next
/// victim, the copy chooses the victim again.
void KvCache::begin_layer(std::uint32_t layer) {
  const AppendMemory& memory = append_memory(layer);
  const kvlab_cache_view& cache = memory.cache;
  const std::size_t all =
      static_cast<std::size_t>(cache.kv_heads) * static_cast<std::size_t>(cache.max_slots);
  if (memory.seen) clear(memory.seen, all);
  if (memory.staged.tiers)  // -1: not quantized
    check(cudaMemsetAsync(memory.staged.tiers, -1, all, stream_), "an append");
  if (append_.fed == 0) {
    clear(cache.lengths, static_cast<std::size_t>(cache.kv_heads));
    clear(cache.next_slots, static_cast<std::size_t>(cache.kv_heads));
    return;
  }
  take_live(memory, append_.sequence, layer, append_.fed,
            settings(append_.sequence).modifiers.once);
  if (append_.uses_cache_positions)
    rotate_keys_to_cache_positions(layer, cache_position_args(layer, {.first = 0, .rows = 0}),
                                   true);
}

void KvCache::attend(std::uint32_t layer, const AppendChunk& part, const AttendedRows& to) {
  const AppendMemory& memory = append_memory(layer);
  // All keys that a query sees must have the same centre subtracted, or none. The prompt's centre
  // is known only after its last key, so the queries of the first append see keys from which no
  // centre was subtracted.
  if (append_.fed > 0 || settings(append_.sequence).centre == KeyCentre::constants)
    centre(layer, part.first, static_cast<std::uint32_t>(part.rows));
  if (append_.uses_cache_positions) {
    const CachePositionArgs shape = cache_position_args(layer, part);
    if (config_.numbering == KVLAB_CACHE_POSITIONS)
      check(rotate_queries_to_cache_positions(shape, work_->q, work_->q, stream_),
            "positions of a prompt");
    rotate_keys_to_cache_positions(layer, shape, false);
  }
  kvlab_prefill_args queries = config_.prefill_shape();
  queries.softmax_scale = config_.layers[layer].softmax_scale;
  queries.first = static_cast<int>(part.first);
  queries.queries = part.rows;
  queries.q = work_->q;
  queries.keys = attended_keys(memory);
  queries.values = memory.cache.values;
  queries.first_slot = memory.first_slots;
  queries.older = memory.cache.lengths;
  queries.out = to.out;
  queries.lse = to.lse;
  queries.rows = scratch_->rows;
  check(prefill_attention(queries, {.sinks = config_.layers[layer].sinks}, stream_),
        "prefill attention");
  if (config_.observes()) observe(layer, queries);
  if (memory.features) keep_plain_keys(layer, part, to);
  if (part.first + static_cast<std::uint32_t>(part.rows) == append_.tokens) keep(layer);
}

/// Adds the attention statistics of the part's queries to each token's observation.
void KvCache::observe(std::uint32_t layer, const kvlab_prefill_args& queries) {
  const int sequence = append_.sequence;
  const auto first = static_cast<std::uint32_t>(queries.first),
             end = first + static_cast<std::uint32_t>(queries.queries);
  std::uint32_t live = 0;
  each_pair(sequence, [&](std::size_t pair) {
    live = std::max(live, older(sequence, layer, pair, append_.fed));
  });
  check(observe_queries({.prefill = queries,
                         .needs = static_cast<kvlab_needs>(config_.kernels.needs),
                         .keys_end = static_cast<int>(live + end),
                         .position = append_.fed + first,
                         .threshold16 = storage_->thresholds + sequence,
                         .seen = append_memory(layer).seen,
                         .workspace = scratch_->observe_workspace,
                         .group_max = settings(sequence).modifiers.group == Modifiers::Group::max,
                         .weights = scratch_->weights,
                         .tail = append_.tail,
                         .younger = static_cast<int>(append_.tokens - end)},
                        stream_),
        "what a prompt's queries give");
}

/// Ends the append in this layer: the policy gets the new tokens and the observations, and the
/// tokens that stay are moved to their slots.
void KvCache::keep(std::uint32_t layer) {
  const int sequence = append_.sequence;
  stepped_[static_cast<std::size_t>(sequence)] = false;
  const AppendMemory& memory = append_memory(layer);
  const bool ends_prompt = append_.ends_prompt, once = settings(sequence).modifiers.once;
  if (memory.features) make_features_of_new(layer);
  if (append_.fed == 0) find_centre(layer);
  if (counts(sequence)) count_append(sequence, layer, append_.tokens);
  kvlab_compact_args args =
      to_slots(memory, sequence, layer, work_->appended, once && !ends_prompt);
  args.seen = memory.seen;
  if (ends_prompt && settings(sequence).share) return keep_by_shares(layer, args);
  compact(memory, args, sequence, layer, ends_prompt);
  number(args.to);
  if (counts(sequence)) count_evictions(sequence, layer, ends_prompt);
}

/// Subtracts the centre from the keys of the append's tokens [first, first + tokens).
void KvCache::centre(std::uint32_t layer, std::uint32_t first, std::uint32_t tokens) {
  if (float* const centres = centres_of(layer))
    check(subtract_centres(append_memory(layer).cache, first, tokens, centres, stream_),
          "centred keys");
}

/// Called after the append at position 0. Finds the centre of the append's keys, and subtracts it
/// from these keys.
void KvCache::find_centre(std::uint32_t layer) {
  float* const centres = centres_of(layer);
  const std::uint32_t keys = centre_keys(append_.tokens);
  if (!centres || keys == 0 || settings(append_.sequence).centre != KeyCentre::prompt) return;
  check(find_centres(append_memory(layer).cache, keys, centres, stream_), "centred keys");
  centre(layer, 0, append_.tokens);
}

/// The centres of the append's sequence [kv_head, dim]; null if its keys are not centred.
float* KvCache::centres_of(std::uint32_t layer) const {
  if (!centres_keys(layer, append_.sequence)) return nullptr;
  return storage_->tiers.centres_of(layer, append_.sequence);
}

/// Appends all tokens within the append memory without evicting, then splits the layer's slots
/// among its heads.
void KvCache::keep_by_shares(std::uint32_t layer, kvlab_compact_args args) {
  const int sequence = append_.sequence;
  const AppendMemory& memory = append_memory(layer);
  args.to = args.from;
  args.to_states = memory.states;
  args.to_features = memory.features;
  args.policy.evict_at = storage_->policy_of_compact(layer, sequence, true).evict_at;
  compact(memory, args, sequence, layer, false);
  auto older = share_slots(memory, sequence, layer, append_.fed + append_.tokens);
  for (std::int32_t& live : older) live -= static_cast<std::int32_t>(append_.tokens);
  // Restores the lengths to the number of live tokens without the new ones. attend() leaves that
  // number in every other append, and the caller may read it with the observations
  // (append_memory()).
  copy_to_device(memory.cache.lengths, older.data(), older.size());
}

/// Stores a part's keys before RoPE. Features are computed once the keys of the whole append are
/// stored.
void KvCache::keep_plain_keys(std::uint32_t layer, const AppendChunk& part,
                              const AttendedRows& to) {
  const AttendedRows keys = attach_keys(to);
  const std::size_t width = static_cast<std::size_t>(config_.kv_heads) * config_.key_bytes();
  cuda::copy_rows(
      {append_memory(layer).plain_keys + part.first * width, width},
      {static_cast<const std::byte*>(keys.plain_keys), keys.key_row * bytes_of(config_.type)},
      width, static_cast<std::size_t>(part.rows), stream_);
}

void KvCache::make_features_of_new(std::uint32_t layer) {
  const AppendMemory& memory = append_memory(layer);
  FeatureArgs args{config_.features};
  args.cache = memory.cache;
  args.slots = memory.cache.lengths;
  args.tokens = static_cast<int>(append_.tokens);
  args.keys = memory.plain_keys;
  args.key_row = std::int64_t{config_.kv_heads} * config_.head_size;
  args.unit_keys = storage_->unit_keys_of(layer, append_.sequence);
  args.to = memory.features;
  args.output = config_.layers[layer].output;
  check(make_features(args, stream_), "features");
}

/// Rotates the older keys, or the new keys of a part, to their cache positions.
void KvCache::rotate_keys_to_cache_positions(std::uint32_t layer, const CachePositionArgs& shape,
                                             bool rotates_older) {
  const AppendMemory& memory = append_memory(layer);
  check(kernels::rotate_keys_to_cache_positions(
            {.shape = shape,
             .slots = memory.cache.max_slots,
             .positions = memory.cache.positions,
             .rotated = config_.numbering == KVLAB_CACHE_POSITIONS_ROTATED,
             .now = append_.fed,
             .keys = memory.cache.keys,
             .to = memory.cache_position_keys},
            rotates_older, stream_),
        "positions of a prompt");
}

CachePositionArgs KvCache::cache_position_args(std::uint32_t layer, const AppendChunk& part) const {
  const std::uint32_t table = config_.layers[layer].table;
  const SlotRope& rope = config_.ropes[table];
  const bool keeps_rotated_keys = config_.numbering == KVLAB_CACHE_POSITIONS_ROTATED;
  return {.type = config_.type,
          .query_heads = config_.query_heads,
          .kv_heads = config_.kv_heads,
          .head_size = config_.head_size,
          .rotated = rope.rotated_dims(),
          .inv_freq = inv_freq(table),
          .rope_factor = keeps_rotated_keys ? 1 : rope.factor,
          .older = append_memory(layer).cache.lengths,
          .first = static_cast<int>(part.first),
          .tokens = part.rows};
}

}  // namespace kvlab::kernels
