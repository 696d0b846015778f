#include "kernels/cache/kv_cache.hpp"

#include <algorithm>

#include "kernels/cache/rope_rows.hpp"
#include "kernels/host/transfer.hpp"

namespace kvlab::kernels {
namespace {

using cuda::check;
using cuda::Placed;

std::size_t aligned_workspace(const KvCacheConfig& config, int max_slots) {
  return cuda::Arena::align_up(config.kernels.attention_workspace(
      config.slot_cache(static_cast<int>(config.sequences.size()), max_slots),
      config.is_quantized()));
}

}  // namespace

KvCache::Work::Work(cuda::Arena& arena, const KvCacheConfig& config, const PairSlots& slots) {
  const auto row_count = static_cast<std::size_t>(config.rows());
  const std::size_t halves = config.ropes.size() * static_cast<std::size_t>(config.head_size) / 2;
  q = arena.take<std::byte>(row_count * static_cast<std::size_t>(config.query_heads) *
                            config.key_bytes());
  inv_freq = arena.take<float>(halves);
  rope = arena.take<float2>(static_cast<std::size_t>(config.rope_rows()) * halves);
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

KvCache::KvCache(KvCacheConfig config, cudaStream_t stream)
    : config_(std::move(config)),
      stream_(stream),
      slots_(config_),
      storage_("the cache's slots", config_, slots_),
      work_("attention", config_, slots_),
      stepped_(config_.sequences.size()),
      sequences_(config_.sequences) {
  if (config_.draft_tokens > 0) {
    want_one_way_to_evict(config_);
    draft_memory_ = Placed<DraftMemory>("drafts", config_, slots_);
  }
  storage_->initialize(config_, slots_, stream_);
  counts_.resize(slots_.all());
  for (std::size_t at = 0; config_.is_quantized() && at < slots_.all(); ++at)
    tier_counts_.emplace_back(
        slots_.tiers(static_cast<std::uint32_t>(at / slots_.pairs()), at % slots_.pairs()));
  shared_when_.resize(sequences_.size());
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

KvCache::Bytes KvCache::bytes(const KvCacheConfig& config, std::uint32_t longest_append) {
  const PairSlots slots(config);
  Bytes bytes{Placed<SlotStorage>::bytes(config, slots),
              Placed<Work>::bytes(config, slots) + Placed<DraftMemory>::bytes(config, slots)};
  const auto max_slots = static_cast<std::uint32_t>(slots.max_slots());
  if (longest_append > 0)
    bytes.work += append_bytes(config, std::max(longest_append, max_slots), max_slots);
  return bytes;
}

void KvCache::clear() {
  drop(0, sequences_.size());
  check(cudaStreamSynchronize(stream_), "clearing a cache");
}

void KvCache::start(int sequence, const SequenceSettings& settings) {
  const auto at = static_cast<std::size_t>(sequence);
  if (!settings.rules.empty()) slots_.set_rules(at, settings.rules);
  SlotSequence& own = sequences_[at];
  if (settings.params) own.params = *settings.params;
  if (settings.threshold16) own.threshold16 = *settings.threshold16;
  if (settings.seed) own.seed = *settings.seed;
  if (settings.id) own.id = *settings.id;

  drop(at, 1);
}

/// Drops the tokens of `count` sequences, beginning with `first`, and writes their settings to the
/// device.
void KvCache::drop(std::size_t first, std::size_t count) {
  for (std::size_t sequence = first; sequence < first + count; ++sequence) {
    slots_.reset(sequence);
    each_head(static_cast<int>(sequence), [&](std::uint32_t layer, std::size_t pair) {
      counts_of(layer, pair) = {};
      if (is_quantized()) tiers_of(layer, pair) = TierCounts(slots_.tiers(layer, pair));
    });
    shared_when_[sequence] = 0;
    stepped_[sequence] = false;
    if (!drafts_.dropped.empty()) drafts_.dropped[sequence] = true;
  }
  if (draft_memory_->now)  // kernels skip the dropped sequences
    check(cudaMemsetAsync(draft_memory_->now + first, 0xff, count * sizeof(std::uint32_t), stream_),
          "drafts");
  storage_->start(slots_, first, std::span(sequences_).subspan(first, count), stream_);
}

void KvCache::copy_sequence(int from, int to) {
  if (from == to) return;
  const auto source = static_cast<std::size_t>(from), target = static_cast<std::size_t>(to);
  slots_.copy(source, target);
  sequences_[target] = sequences_[source];
  storage_->copy(slots_, source, target, sequences_[target], stream_);
  const std::ptrdiff_t apart = std::ptrdiff_t{to - from} * config_.kv_heads;
  each_head(from, [&](std::uint32_t layer, std::size_t pair) {
    const std::size_t other = pair + static_cast<std::size_t>(apart);
    counts_of(layer, other) = counts_of(layer, pair);
    if (is_quantized()) tiers_of(layer, other) = tiers_of(layer, pair);
  });
  shared_when_[target] = shared_when_[source];
  stepped_[target] = stepped_[source];
}

std::byte* KvCache::workspace(int index) const {
  return work_->workspaces +
         aligned_workspace(config_, slots_.max_slots()) * static_cast<std::size_t>(index);
}

void KvCache::fill_ropes(RopeRows user, const std::int32_t* positions, std::uint32_t first,
                         int rows) const {
  if (config_.numbering == KVLAB_CACHE_POSITIONS && !config_.other_ropes) return;
  for (std::uint32_t table = 0; table < config_.ropes.size(); ++table) {
    const SlotRope& rope = config_.ropes[table];
    check(fill_rope_rows(inv_freq(table), rope.rotated_dims() / 2, positions, first, rows,
                         rope.factor, rope_rows(user, table), stream_),
          "RoPE");
  }
}

/// Returns the first row of a RoPE table that belongs to `user`.
float2* KvCache::rope_rows(RopeRows user, std::uint32_t table) const {
  const std::size_t step = config_.part, drafts = step + config_.sequences.size(),
                    first = user == RopeRows::append ? 0
                            : user == RopeRows::step ? step
                                                     : drafts;
  return work_->rope + (table * static_cast<std::size_t>(config_.rope_rows()) + first) * halves();
}

void KvCache::rotate(RopeRows user, std::uint32_t table, RopeWriteArgs& args) const {
  args.rotated = config_.ropes[table].rotated_dims();
  args.rope = &rope_rows(user, table)->x;
  args.rope_rows = work_->iota;  // token i uses row i
}

AttendedRows KvCache::attach_keys(AttendedRows rows) const {
  if (rows.plain_keys) return rows;
  rows.plain_keys = work_->plain_k;
  rows.key_row = static_cast<std::size_t>(config_.kv_heads * config_.head_size);
  return rows;
}

// --- Counts --------------------------------------------------------------------------------------

std::uint64_t KvCache::live_bytes(int sequence, std::uint32_t fed) const {
  std::uint64_t live = 0, tier_bytes = 0;
  each_head(sequence, [&](std::uint32_t layer, std::size_t pair) {
    const Counts& own = counts_of(layer, pair);
    tier_bytes += own.max_bytes;
    if (counts(sequence))
      live += own.max_live;
    else
      live += live_after_append(fed, slots_.budget(layer, pair));
  });
  return is_quantized() ? tier_bytes : live * 2 * config_.key_bytes();
}

std::uint64_t KvCache::held_bytes(int sequence, std::uint32_t fed, bool after_append) const {
  std::uint64_t bytes = 0;
  each_head(sequence, [&](std::uint32_t layer, std::size_t pair) {
    const auto head = static_cast<std::uint32_t>(pair % static_cast<std::size_t>(config_.kv_heads));
    // An append evicts to the budget at its end, but a step evicts at its beginning.
    const std::uint32_t held = after_append && !counts(sequence) ? slots_.older(layer, pair, fed)
                                                                 : live(sequence, layer, head, fed);
    bytes += is_quantized() ? bytes_on_tiers(layer, pair)
                            : std::uint64_t{held} * 2 * config_.key_bytes();
  });
  return bytes;
}

std::uint64_t KvCache::allocated_bytes() const {
  if (config_.pages.blocks) return 0;
  if (is_quantized()) return static_cast<std::uint64_t>(TierLayout(config_, slots_).bytes);
  return static_cast<std::uint64_t>(slots_.total()) * 2 * config_.key_bytes();
}

std::uint32_t KvCache::live(int sequence, std::uint32_t layer, std::uint32_t head,
                            std::uint32_t fed) const {
  const std::size_t pair =
      static_cast<std::size_t>(sequence) * static_cast<std::size_t>(config_.kv_heads) + head;
  if (counts(sequence)) return counts_of(layer, pair).live;
  return live_after_append(fed, slots_.budget(layer, pair));
}

std::uint32_t KvCache::until_eviction(int sequence, std::uint32_t fed) const {
  const Modifiers& own = settings(sequence).modifiers;
  std::uint32_t tokens = kUnlimited;
  each_head(sequence, [&](std::uint32_t layer, std::size_t pair) {
    const std::uint32_t budget = slots_.budget(layer, pair);
    if (budget == kUnlimited || own.once) return;
    std::uint32_t live = older(sequence, layer, pair, fed);
    if (counts(sequence)) live -= surplus(layer, pair, false);
    tokens = std::min(tokens, own.evict_at(budget) - live);
  });
  return tokens;
}

std::vector<std::uint32_t> KvCache::kept_positions(int sequence, std::uint32_t layer,
                                                   std::uint32_t head) const {
  constexpr const char* kWhat = "reading the kept positions";
  const std::size_t pair =
      static_cast<std::size_t>(sequence) * static_cast<std::size_t>(config_.kv_heads) + head;
  const std::size_t at = layer * slots_.pairs() + pair;
  const auto live = cuda::read(storage_->lengths + at, 1, stream_, kWhat)[0];
  auto kept = cuda::read(storage_->positions + slots_.first_slots()[at],
                         static_cast<std::size_t>(live), stream_, kWhat);
  std::ranges::sort(kept);
  return kept;
}

std::uint64_t KvCache::evictions(int sequence, std::uint32_t before) const {
  std::uint64_t left = 0;
  each_head(sequence, [&](std::uint32_t layer, std::size_t pair) {
    left += before -
            (counts(sequence) ? counts_of(layer, pair).before : slots_.older(layer, pair, before));
  });
  return left;
}

void KvCache::pretend(std::uint32_t tokens) {
  for (std::uint32_t layer = 0; layer < config_.layers.size(); ++layer) {
    const std::int64_t begin = slots_.range(layer, 0).first,
                       count = slots_.end_of_layer(layer) - begin;
    const std::size_t first_pair = layer * slots_.pairs();
    std::vector<std::uint32_t> positions(static_cast<std::size_t>(count));
    std::vector<std::int32_t> lengths;
    for (std::size_t pair = 0; pair < slots_.pairs(); ++pair) {
      const std::size_t at = first_pair + pair;
      const std::uint32_t live = slots_.older(layer, pair, tokens);
      counts_of(layer, pair) = {{.live = live, .before = live, .max_live = live}, 0, tokens};
      if (is_quantized()) {
        TierCounts& tiers = tiers_of(layer, pair) = TierCounts(slots_.tiers(layer, pair));
        tiers.fill(live);
        storage_->tiers.pretend(slots_, at, tiers);
      }
      lengths.push_back(static_cast<std::int32_t>(live));
      // Keeps the sinks and the youngest tokens.
      const std::uint32_t sinks = std::min(live, slots_.protected_tokens(layer, pair).sinks);
      const auto own = positions.begin() + (slots_.first_slots()[at] - begin);
      std::iota(own, own + sinks, 0u);
      std::iota(own + sinks, own + live, tokens - live + sinks);
    }
    copy_to_device(storage_->positions + begin, positions.data(), positions.size());
    copy_to_device(storage_->lengths + first_pair, lengths.data(), lengths.size());
    copy_to_device(storage_->next_slots + first_pair, lengths.data(), lengths.size());
    const auto clear_slots = [&](auto* array, std::size_t width) {
      if (width > 0)
        clear(array + static_cast<std::size_t>(begin) * width,
              static_cast<std::size_t>(count) * width);
    };
    clear_slots(storage_->states, config_.kernels.slot_bytes);
    clear_slots(storage_->features, static_cast<std::size_t>(config_.features.count));
    number(storage_->cache(layer, static_cast<int>(sequences_.size())));
  }
  check(cudaStreamSynchronize(stream_), "filling a cache with random values");
}

void KvCache::number(const kvlab_cache_view& cache) const {
  if (config_.numbering == KVLAB_CACHE_POSITIONS)
    check(fill_ages(cache, stream_), "numbering by cache position");
}

}  // namespace kvlab::kernels
