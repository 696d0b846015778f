#include "kernels/cache/slot_caches.hpp"

#include <algorithm>

#include "kernels/cache/rope_rows.hpp"
#include "kernels/host/transfer.hpp"

namespace kvlab::kernels {
namespace {

using cuda::check;
using cuda::Placed;

std::size_t aligned_workspace(const SlotsConfig& config, int max_slots) {
  return cuda::Arena::align_up(config.kernels.attention_workspace(
      config.slot_cache(static_cast<int>(config.sequences.size()), max_slots),
      config.is_quantized()));
}

}  // namespace

SlotCaches::Work::Work(cuda::Arena& arena, const SlotsConfig& config, const PairSlots& slots) {
  const auto row_count = static_cast<std::size_t>(config.rows());
  const std::size_t halves = config.ropes.size() * static_cast<std::size_t>(config.head_size) / 2;
  q = arena.take<std::byte>(row_count * static_cast<std::size_t>(config.query_heads) *
                            config.key_bytes());
  inv_freq = arena.take<float>(halves);
  rope = arena.take<float2>(row_count * halves);
  plain_k = arena.take<std::byte>(config.norms_keys && config.features.count > 0
                                      ? row_count * static_cast<std::size_t>(config.kv_heads) *
                                            config.key_bytes()
                                      : 0);
  iota = arena.take<std::int32_t>(row_count);
  zeros = arena.take<std::int32_t>(row_count);
  nothing = arena.take<Appended>(1);
  appended = arena.take<Appended>(1);
  ended = arena.take<Appended>(1);
  workspaces = arena.take<std::byte>(aligned_workspace(config, slots.max_slots()) *
                                     static_cast<std::size_t>(config.workspaces));
}

SlotCaches::SlotCaches(SlotsConfig config, cudaStream_t stream)
    : config_(std::move(config)),
      stream_(stream),
      slots_(config_),
      storage_("the cache's slots", config_, slots_),
      work_("attention", config_, slots_) {
  clear();
  for (std::uint32_t layer = 0; is_quantized() && layer < config_.layers.size(); ++layer)
    for (int sequence = 0; sequence < static_cast<int>(config_.sequences.size()); ++sequence)
      quantized_.push_back(storage_->tiers.quantized_cache(layer, sequence));
  for (std::size_t table = 0; table < config_.ropes.size(); ++table)
    cuda::write(work_->inv_freq + table * halves(), config_.ropes[table].inv_freq,
                "RoPE's frequencies");
  check(fill_iota(work_->iota, config_.rows(), stream), "a prompt");
  clear(work_->zeros, static_cast<std::size_t>(config_.rows()));
  for (int at = 0; at < config_.workspaces; ++at)
    clear(workspace(at), std::min(aligned_workspace(config_, slots_.max_slots()), kSignalBytes));
}

SlotCaches::Bytes SlotCaches::bytes(const SlotsConfig& config, std::uint32_t longest_append) {
  const PairSlots slots(config);
  Bytes bytes{Placed<SlotStorage>::bytes(config, slots), Placed<Work>::bytes(config, slots)};
  if (longest_append > 0)
    bytes.work += Placed<AppendMemory>::bytes(
        config, std::max(longest_append, static_cast<std::uint32_t>(slots.max_slots())));
  return bytes;
}

void SlotCaches::clear() {
  check(cudaStreamSynchronize(stream_), "clearing a cache");
  slots_ = PairSlots(config_);
  storage_->clear(config_, slots_);
  counts_.assign(slots_.all(), {});
  shared_when_.assign(config_.sequences.size(), 0);
  tier_counts_.clear();
  for (std::size_t at = 0; config_.is_quantized() && at < counts_.size(); ++at)
    tier_counts_.emplace_back(
        slots_.tiers(static_cast<std::uint32_t>(at / slots_.pairs()), at % slots_.pairs()));
}

std::byte* SlotCaches::workspace(int index) const {
  return work_->workspaces +
         aligned_workspace(config_, slots_.max_slots()) * static_cast<std::size_t>(index);
}

void SlotCaches::fill_ropes(const std::int32_t* positions, std::uint32_t first, int rows) const {
  if (config_.numbering == KVLAB_SQUEEZED && !config_.other_ropes) return;
  for (std::uint32_t table = 0; table < config_.ropes.size(); ++table) {
    const SlotRope& rope = config_.ropes[table];
    check(fill_rope_rows(
              inv_freq(table), rope.rotated_dims() / 2, positions, first, rows, rope.factor,
              work_->rope + table * static_cast<std::size_t>(config_.rows()) * halves(), stream_),
          "RoPE");
  }
}

void SlotCaches::rotate(std::uint32_t table, RopeWriteArgs& args) const {
  args.rotated = config_.ropes[table].rotated_dims();
  args.rope = &work_->rope[table * static_cast<std::size_t>(config_.rows()) * halves()].x;
  args.rope_rows = work_->iota;  // rows of the RoPE table, which has one for each token
}

AttendedRows SlotCaches::with_keys(AttendedRows rows) const {
  if (rows.plain_keys) return rows;
  rows.plain_keys = work_->plain_k;
  rows.key_row = static_cast<std::size_t>(config_.kv_heads * config_.head_size);
  return rows;
}

// --- Counts --------------------------------------------------------------------------------------

std::uint64_t SlotCaches::live_bytes(int sequence, std::uint32_t fed) const {
  std::uint64_t live = 0, tier_bytes = 0;
  each_head(sequence, [&](std::uint32_t layer, std::size_t pair) {
    const Counts& own = counts_of(layer, pair);
    tier_bytes += own.max_bytes;
    if (counts(sequence))
      live += own.most;
    else
      live += fed == 0 ? 0 : slots_.older(layer, pair, fed - 1) + 1;
  });
  return is_quantized() ? tier_bytes : live * 2 * config_.key_bytes();
}

std::uint64_t SlotCaches::held_bytes(int sequence, std::uint32_t fed) const {
  std::uint64_t bytes = 0;
  each_head(sequence, [&](std::uint32_t layer, std::size_t pair) {
    const auto head = static_cast<std::uint32_t>(pair % static_cast<std::size_t>(config_.kv_heads));
    bytes += is_quantized()
                 ? bytes_on_tiers(layer, pair)
                 : std::uint64_t{live(sequence, layer, head, fed)} * 2 * config_.key_bytes();
  });
  return bytes;
}

std::uint64_t SlotCaches::allocated_bytes() const {
  if (is_quantized()) return static_cast<std::uint64_t>(TierLayout(config_, slots_).bytes);
  return static_cast<std::uint64_t>(slots_.total()) * 2 * config_.key_bytes();
}

std::uint32_t SlotCaches::live(int sequence, std::uint32_t layer, std::uint32_t head,
                               std::uint32_t fed) const {
  const std::size_t pair =
      static_cast<std::size_t>(sequence) * static_cast<std::size_t>(config_.kv_heads) + head;
  if (counts(sequence)) return counts_of(layer, pair).live;
  return fed > 0 ? slots_.older(layer, pair, fed - 1) + 1 : 0;
}

std::vector<std::uint32_t> SlotCaches::kept_positions(int sequence, std::uint32_t layer,
                                                      std::uint32_t head) const {
  constexpr const char* kWhat = "who is kept";
  const std::size_t pair =
      static_cast<std::size_t>(sequence) * static_cast<std::size_t>(config_.kv_heads) + head;
  const std::size_t at = layer * slots_.pairs() + pair;
  const auto live = cuda::read(storage_->lengths + at, 1, stream_, kWhat)[0];
  auto kept = cuda::read(storage_->positions + slots_.first_slots()[at],
                         static_cast<std::size_t>(live), stream_, kWhat);
  std::ranges::sort(kept);
  return kept;
}

std::uint64_t SlotCaches::evictions(int sequence, std::uint32_t behind) const {
  std::uint64_t left = 0;
  each_head(sequence, [&](std::uint32_t layer, std::size_t pair) {
    left += behind -
            (counts(sequence) ? counts_of(layer, pair).behind : slots_.older(layer, pair, behind));
  });
  return left;
}

void SlotCaches::pretend(int sequence, std::uint32_t tokens) {
  each_head(sequence, [&](std::uint32_t layer, std::size_t pair) {
    const std::size_t at = layer * slots_.pairs() + pair;
    const auto first = static_cast<std::size_t>(slots_.first_slots()[at]);
    const std::uint32_t live = slots_.older(layer, pair, tokens);
    counts_of(layer, pair) = {.live = live, .behind = live, .most = live};
    if (is_quantized()) storage_->tiers.pretend(slots_, at, pair, live);
    // Keeps the sinks and the youngest tokens, with zeros as states and features.
    const std::uint32_t sinks = slots_.protected_tokens(layer, pair).sinks;
    std::vector<std::uint32_t> positions(live);
    for (std::uint32_t i = 0; i < live; ++i) positions[i] = i < sinks ? i : tokens - live + i;
    copy(storage_->positions + first, positions.data(), positions.size());
    if (const std::size_t bytes = config_.kernels.slot_bytes; bytes > 0)
      clear(storage_->states + first * bytes, live * bytes);
    if (const auto count = static_cast<std::size_t>(config_.features.count); count > 0)
      clear(storage_->features + first * count, live * count);
    copy(storage_->lengths + at, reinterpret_cast<const std::int32_t*>(&live), 1);
    copy(storage_->next_slots + at, reinterpret_cast<const std::int32_t*>(&live), 1);
  });
  for (std::uint32_t layer = 0; layer < config_.layers.size(); ++layer)
    number(storage_->cache_of(layer, sequence));
  check(cudaStreamSynchronize(stream_), "filling a cache with random values");
}

void SlotCaches::number(const kvlab_cache& cache) const {
  if (config_.numbering == KVLAB_SQUEEZED)
    check(fill_ages(cache, stream_), "numbering by cache position");
}

// --- Evicting to the budget ----------------------------------------------------------------------

std::uint32_t SlotCaches::surplus(std::uint32_t layer, std::size_t pair, bool after_prompt) const {
  const std::uint32_t budget = slots_.budget(layer, pair);
  return budget == kUnlimited
             ? 0
             : slots_.modifiers(pair).surplus(counts_of(layer, pair).live, budget, after_prompt);
}

/// Max number of tokens that are live when more are appended after `fed` tokens, without the new
/// ones.
std::uint32_t SlotCaches::older(int sequence, std::uint32_t layer, std::size_t pair,
                                std::uint32_t fed) const {
  return counts(sequence) ? counts_of(layer, pair).live : slots_.older(layer, pair, fed);
}

void SlotCaches::modify(kvlab_shrink_args& args, int sequence, bool after_prompt) const {
  const Modifiers& own = of(sequence).modifiers;
  args.by_layer = own.scope == Modifiers::Scope::layer;
  args.smooth = own.smooths(after_prompt) ? own.smooth : 0;
  args.pool_max = own.pool == Modifiers::Pool::max;
}

/// Evicts in place, if tokens have to be evicted before more are appended after `fed` tokens.
void SlotCaches::evict_to_budget(int sequence, std::uint32_t fed, bool after_prompt,
                                 LayerRange layers) {
  bool moves = false;
  each_head(sequence, layers, [&](std::uint32_t layer, std::size_t pair) {
    moves |= surplus(layer, pair, after_prompt) > 0 ||
             (is_quantized() && tiers_of(layer, pair)
                                    .needs_eviction(slots_.modifiers(pair),
                                                    slots_.budget(layer, pair), after_prompt));
  });
  if (!moves) return;
  reserve();  // may fail, so it comes before anything is counted
  each_head(sequence, layers, [&](std::uint32_t layer, std::size_t pair) {
    count_evictions_of(layer, pair, after_prompt);
  });
  const Appended nothing{fed, 0};
  copy(work_->nothing, &nothing, 1);
  for (std::uint32_t layer = layers.first; layer < end_of(layers); ++layer) {
    compact_in_place(sequence, layer, after_prompt);
    number(storage_->cache_of(layer, sequence));
  }
}

kvlab_shrink_args SlotCaches::to_slots(int sequence, std::uint32_t layer, const Appended* appended,
                                       bool stays) const {
  kvlab_shrink_args args{.from = memory_->cache,
                         .to = storage_->cache_of(layer, sequence),
                         .policy = storage_->policy_of_compact(layer, sequence, stays),
                         .to_states = storage_->states,
                         .now = &appended->now,
                         .appended = &appended->tokens,
                         .workspace = memory_->compact_workspace,
                         .to_features = storage_->features};
  args.policy.states = memory_->states;
  args.policy.features = memory_->features;
  return args;
}

/// Compacts a layer's slots in place. Tokens on tiers are first read into the append memory.
void SlotCaches::compact_in_place(int sequence, std::uint32_t layer, bool after_prompt) const {
  kvlab_shrink_args args = to_slots(sequence, layer, work_->nothing, false);
  if (is_quantized()) {
    take_live(sequence, layer, true);
  } else {
    args.from = args.to;
    args.policy.states = storage_->states;
    args.policy.features = storage_->features;
  }
  compact(args, sequence, layer, after_prompt);
}

void SlotCaches::take_live(int sequence, std::uint32_t layer, bool stays) const {
  compact({.from = storage_->cache_of(layer, sequence),
           .to = memory_->cache,
           .policy = storage_->policy_of_compact(layer, sequence, stays),
           .to_states = memory_->states,
           .now = &work_->nothing->now,
           .appended = &work_->nothing->tokens,
           .workspace = memory_->compact_workspace,
           .to_features = memory_->features},
          sequence, layer, false);
}

void SlotCaches::compact(kvlab_shrink_args args, int sequence, std::uint32_t layer,
                         bool after_prompt) const {
  modify(args, sequence, after_prompt);
  if (!is_quantized())
    return check(kernels::compact(config_.kernels, args, stream_), "a compaction");
  const QuantizedCache quantized_cache = storage_->tiers.quantized_cache(layer, sequence);
  const auto move = args.to.keys == memory_->cache.keys ? read_from_tiers : compact_to_tiers;
  check(move(config_.kernels, args, quantized_cache, memory_->staged, stream_),
        "tokens and their tiers");
}

std::uint64_t SlotCaches::bytes_on_tiers(std::uint32_t layer, std::size_t pair) const {
  const TierCounts& tiers = tier_counts_[layer * slots_.pairs() + pair];
  std::uint64_t bytes = 0;
  for (std::size_t r = 0; r < tiers.tier_plan().size(); ++r) {
    const KvFormat& format = *tiers.tier_plan()[r].format;
    bytes += tiers.on(r) * (format.exact() ? 2 * config_.key_bytes()
                                           : format.block_bytes() * halves() * 2 / kQuantBlock);
  }
  return bytes;
}

/// Updates the peak bytes, with the tokens that were just appended.
void SlotCaches::count_bytes(std::uint32_t layer, std::size_t pair) {
  if (!is_quantized()) return;
  std::uint64_t& most = counts_of(layer, pair).max_bytes;
  most = std::max(most, bytes_on_tiers(layer, pair));
}

/// Counts an append of `tokens` tokens, which first evicts to the budget.
void SlotCaches::count_append(int sequence, std::uint32_t layer, std::uint32_t tokens) {
  each_pair(sequence, [&](std::size_t pair) {
    Counts& own = counts_of(layer, pair);
    own.live -= surplus(layer, pair, false);
    own.behind = own.live;
    own.live += tokens;
    own.most = std::max(own.most, own.live);
    append_to_tiers(layer, pair, tokens);
  });
}

/// Counts the evictions after an append.
void SlotCaches::count_evictions(int sequence, std::uint32_t layer, bool after_prompt) {
  each_pair(sequence, [&](std::size_t pair) {
    count_evictions_of(layer, pair, after_prompt);
    count_bytes(layer, pair);
  });
}

void SlotCaches::count_evictions_of(std::uint32_t layer, std::size_t pair, bool after_prompt) {
  counts_of(layer, pair).live -= surplus(layer, pair, after_prompt);
  if (is_quantized())
    tiers_of(layer, pair)
        .evict_to_budget(slots_.modifiers(pair), slots_.budget(layer, pair), after_prompt);
}

/// Counts appended tokens on tiers, after evicting to the budget.
void SlotCaches::append_to_tiers(std::uint32_t layer, std::size_t pair, std::uint32_t tokens) {
  if (!is_quantized()) return;
  TierCounts& tiers = tiers_of(layer, pair);
  tiers.evict_to_budget(slots_.modifiers(pair), slots_.budget(layer, pair), false);
  tiers.append(tokens);
}

void SlotCaches::end_prompt(int sequence, std::uint32_t fed, LayerRange layers) {
  if (of(sequence).share) {
    if (shared_when_[static_cast<std::size_t>(sequence)] != fed) share_slots_of_live(sequence, fed);
  } else if (of(sequence).modifiers != Modifiers{}) {
    evict_to_budget(sequence, fed, true, layers);
  }
}

// --- Shared slots --------------------------------------------------------------------------------

/// After a prompt: splits a layer's slots among its KV heads by their ranks, and moves the live
/// tokens, all of which the append memory must hold, to these slots. Synchronizes. Returns the
/// number of live tokens before, [kv_head].
std::vector<std::int32_t> SlotCaches::share_slots(int sequence, std::uint32_t layer,
                                                  std::uint32_t fed) {
  constexpr const char* kWhat = "sharing slots";
  const AppendMemory& memory = *memory_;
  const Appended ended{fed, 0};
  copy(work_->ended, &ended, 1);
  kvlab_shrink_args args = to_slots(sequence, layer, work_->ended, false);
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
  slots_.share(layer, static_cast<std::size_t>(sequence), of(sequence).share(keys));
  storage_->write_pairs(slots_, layer * slots_.pairs() + first, heads);
  check(kernels::compact(config_.kernels, args, stream_), kWhat);
  number(args.to);
  count_evictions(sequence, layer, true);
  shared_when_[static_cast<std::size_t>(sequence)] = fed;
  return lengths;
}

/// For a prompt whose last token was fed by a step: first copies the live tokens to the append
/// memory.
void SlotCaches::share_slots_of_live(int sequence, std::uint32_t fed) {
  reserve();
  const Appended nothing{fed, 0};
  copy(work_->nothing, &nothing, 1);
  for (std::uint32_t layer = 0; layer < config_.layers.size(); ++layer) {
    take_live(sequence, layer, true);
    share_slots(sequence, layer, fed);
  }
}

// --- Steps ---------------------------------------------------------------------------------------

void SlotCaches::reserve_for_steps() {
  for (const SlotSequence& sequence : config_.sequences)
    if (!sequence.modifiers.steps_evict()) reserve();
}

void SlotCaches::before_token(int sequence, std::uint32_t fed, LayerRange layers) {
  if (!counts(sequence)) return;
  if (!of(sequence).modifiers.steps_evict()) evict_to_budget(sequence, fed, false, layers);
  each_head(sequence, layers, [&](std::uint32_t layer, std::size_t pair) {
    Counts& own = counts_of(layer, pair);
    own.live -= surplus(layer, pair, false);  // the step itself evicts these
    own.behind = own.live++;
    own.most = std::max(own.most, own.live);
    append_to_tiers(layer, pair, 1);
    count_bytes(layer, pair);
  });
}

RopeWriteArgs SlotCaches::write(std::uint32_t layer, const StepRows& rows) const {
  RopeWriteArgs args{};
  args.cache = cache_of(layer, rows);
  args.sequences = work_->iota;
  args.now = rows.now;
  if (is_quantized()) {  // store_in_tiers() does the rest
    const TierStorage& tiers = storage_->tiers;
    args.cache.first_slot = tiers.newest + std::ptrdiff_t{rows.first} * config_.kv_heads;
    args.cache.next_slots = tiers.nothing;
    args.cache.positions = nullptr;
  }
  args.q = work_->q;
  args.plain_k = work_->plain_k;
  if (config_.numbering != KVLAB_SQUEEZED) rotate(config_.layers[layer].table, args);
  return args;
}

void SlotCaches::store_in_tiers(std::uint32_t layer, const StepRows& rows) const {
  if (is_quantized())
    check(store_newest(cache_of(layer, rows), quantized_cache_of(layer, rows), rows.now, stream_),
          "the newest tokens");
}

EvictingAttentionArgs SlotCaches::step(std::uint32_t layer, const StepRows& rows,
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

void SlotCaches::bring(std::uint32_t layer, const StepRows& rows, const AttendedRows& to) const {
  if (config_.features.count == 0) return;
  const AttendedRows keys = with_keys(to);
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
