// Verifies draft tokens in a KvCache. For all sequences together, the last token of a text and its
// drafts are written to the slots after the live tokens, and their queries attend to these and to
// the live tokens. Then the caller says how many tokens are accepted. The accepted tokens of a
// sequence become an append, in place. The slots of the others are free again.
//
// The policy gets only the accepted tokens. So until they are known, each layer's queries, softmax
// statistics and keys before RoPE are kept.
#include <algorithm>
#include <stdexcept>

#include "kernels/cache/kv_cache.hpp"
#include "kernels/host/transfer.hpp"

namespace kvlab::kernels {
namespace {

using cuda::check;

constexpr const char* kWhat = "drafts";

/// With fewer pairs than this, one thread block for each pair would leave most of the GPU idle.
constexpr int kFewPairs = 128;

}  // namespace

DraftMemory::DraftMemory(cuda::Arena& arena, const KvCacheConfig& config, const PairSlots& slots) {
  if (config.draft_tokens == 0) return;
  const std::size_t sequences = config.sequences.size(), layers = config.layers.size(),
                    rows = static_cast<std::size_t>(config.draft_rows()),
                    query_heads = static_cast<std::size_t>(config.query_heads),
                    kv_heads = static_cast<std::size_t>(config.kv_heads);
  const kvlab_cache_view cache = config.slot_cache(static_cast<int>(sequences), slots.max_slots());
  kvlab_prefill_args queries = config.prefill_shape();
  queries.queries = static_cast<int>(config.draft_tokens);
  queries.sequences = static_cast<int>(sequences);
  queries.all_queries = static_cast<int>(rows);
  queries.keys_end = slots.max_slots();
  q = arena.take<std::byte>(layers * rows * query_heads * config.key_bytes());
  if (config.features.count > 0)
    plain_keys = arena.take<std::byte>(layers * rows * kv_heads * config.key_bytes());
  row_sequences = arena.take<std::int32_t>(rows);
  row_slots = arena.take<std::int32_t>(rows);
  row_positions = arena.take<std::int32_t>(rows);
  first_rows = arena.take<std::int32_t>(sequences + 1);
  now = arena.take<std::uint32_t>(sequences);
  appended = arena.take<std::uint32_t>(sequences);
  if (splits_keys(config)) attention_workspace = arena.take<std::byte>(prefill_workspace(queries));
  if (config.observes()) {
    softmax = arena.take<RowSoftmax>(layers * rows * query_heads);
    observe_workspace = arena.take<std::byte>(kernels::observe_workspace(queries));
    seen = arena.take<kvlab_observation>(static_cast<std::size_t>(slots.max_slots_of_layer()));
  }
  if (config.kernels.weighted) weights = arena.take<float>(config.draft_tokens);
  compact_workspace = arena.take<std::byte>(kernels::compact_workspace(cache));
  ranks = arena.take<std::uint64_t>(config.gathered_ranks(cache));
}

bool DraftMemory::splits_keys(const KvCacheConfig& config) {
  return static_cast<int>(config.sequences.size()) * config.kv_heads < kFewPairs &&
         std::ranges::none_of(config.layers, [](const SlotLayer& layer) { return layer.sinks; });
}

void want_one_way_to_evict(const KvCacheConfig& config) {
  const SlotSequence& first = config.sequences.front();
  if (std::ranges::any_of(config.sequences, [&](const SlotSequence& one) {
        return one.modifiers != first.modifiers || one.share;
      }))
    throw std::invalid_argument(
        "drafts of all sequences are appended together, so all need the same modifiers, and none "
        "may share slots among its KV heads");
}

void KvCache::begin_drafts(std::span<const std::uint32_t> fed,
                           std::span<const std::uint32_t> tokens) {
  if (config_.kernels.weighted) want_same_params(tokens);
  drafts_ = {{fed.begin(), fed.end()}, {tokens.begin(), tokens.end()}};
  std::vector<std::int32_t> row_sequences, row_slots, row_positions, first_rows{0};
  for (std::size_t s = 0; s < tokens.size(); ++s) {
    for (std::uint32_t i = 0; i < tokens[s]; ++i) {
      row_sequences.push_back(static_cast<std::int32_t>(s));
      row_slots.push_back(static_cast<std::int32_t>(i));
      row_positions.push_back(static_cast<std::int32_t>(fed[s] + i));
    }
    first_rows.push_back(static_cast<std::int32_t>(row_slots.size()));
  }
  cuda::enqueue_write(draft_memory_->row_sequences, row_sequences, stream_, kWhat);
  cuda::enqueue_write(draft_memory_->row_slots, row_slots, stream_, kWhat);
  cuda::enqueue_write(draft_memory_->row_positions, row_positions, stream_, kWhat);
  cuda::enqueue_write(draft_memory_->first_rows, first_rows, stream_, kWhat);
  fill_ropes(RopeRows::drafts, draft_memory_->row_positions, 0, drafts_.rows());
  evict_before_drafts();
}

/// Throws if sequences with drafts have different parameters, because one array holds the weights
/// of the queries of all sequences.
void KvCache::want_same_params(std::span<const std::uint32_t> tokens) const {
  const SlotSequence* first = nullptr;
  for (std::size_t s = 0; s < tokens.size(); ++s) {
    if (tokens[s] == 0) continue;
    if (first == nullptr) first = &sequences_[s];
    if (sequences_[s].params != first->params)
      throw std::invalid_argument(
          "the policy weighs queries, and the parameters of sequences differ; verify drafts of "
          "sequences with equal parameters together");
  }
}

/// After a step, the slot of the next victim still counts as live. Evicts it, so that all slots
/// after the live tokens are free.
void KvCache::evict_before_drafts() {
  bool any = false;
  for (std::size_t s = 0; s < stepped_.size(); ++s) any |= stepped_[s] && drafts_.has(s);
  write_appended(std::vector<std::uint32_t>(sequences_.size()), false);
  for (std::uint32_t layer = 0; any && layer < config_.layers.size(); ++layer)
    compact_drafts(layer, nullptr);
  for (std::size_t s = 0; s < stepped_.size(); ++s) {
    if (!drafts_.has(s) || !stepped_[s]) continue;
    stepped_[s] = false;
    const auto sequence = static_cast<int>(s);
    if (!counts(sequence)) continue;
    each_head(sequence, [&](std::uint32_t layer, std::size_t pair) {
      count_evictions_of(layer, pair, false);
    });
  }
}

/// Writes the position of each sequence's next token, and how many tokens it appends. Kernels skip
/// the sequences that have no drafts or, with `only_appends`, that append nothing.
void KvCache::write_appended(std::span<const std::uint32_t> tokens, bool only_appends) const {
  std::vector<std::uint32_t> now;
  for (std::size_t s = 0; s < tokens.size(); ++s)
    now.push_back(drafts_.has(s) && (tokens[s] > 0 || !only_appends) ? drafts_.fed[s] : kIdle);
  cuda::enqueue_write(draft_memory_->now, now, stream_, kWhat);
  cuda::enqueue_write(draft_memory_->appended, std::vector(tokens.begin(), tokens.end()), stream_,
                      kWhat);
}

RopeWriteArgs KvCache::write_drafts(std::uint32_t layer) const {
  RopeWriteArgs args{};
  args.cache = storage_->cache(layer, static_cast<int>(sequences_.size()));
  args.cache.positions = nullptr;  // accept_drafts() sets them
  args.tokens = drafts_.rows();
  args.sequences = draft_memory_->row_sequences;
  args.now = draft_memory_->now;  // so that nothing is written for a sequence that was dropped
  args.slots = draft_memory_->row_slots;
  args.q = draft_queries(layer);
  args.plain_k = work_->plain_k;
  rotate(RopeRows::drafts, config_.layers[layer].table, args);
  return args;
}

std::byte* KvCache::draft_queries(std::uint32_t layer) const {
  return draft_memory_->q + layer * static_cast<std::size_t>(config_.draft_rows()) *
                                static_cast<std::size_t>(config_.query_heads) * config_.key_bytes();
}

kvlab_prefill_args KvCache::draft_attention(std::uint32_t layer) const {
  const kvlab_cache_view cache = storage_->cache(layer, static_cast<int>(sequences_.size()));
  std::uint32_t keys_end = 0;
  for (std::size_t s = 0; s < sequences_.size(); ++s)
    if (drafts_.has(s))
      each_pair(static_cast<int>(s), [&](std::size_t pair) {
        keys_end = std::max(
            keys_end, older(static_cast<int>(s), layer, pair, drafts_.fed[s]) + drafts_.tokens[s]);
      });
  if (keys_end > static_cast<std::uint32_t>(slots_.max_slots()))
    throw std::logic_error("drafts: a KV head has too few slots for its live tokens and drafts");
  kvlab_prefill_args args = config_.prefill_shape();
  args.softmax_scale = cache.softmax_scale;
  args.queries = static_cast<int>(std::ranges::max(drafts_.tokens));
  args.q = draft_queries(layer);
  args.keys = cache.keys;
  args.values = cache.values;
  args.first_slot = cache.first_slot;
  args.older = cache.lengths;
  args.pages = cache.pages;
  args.sequences = cache.sequences;
  args.all_queries = drafts_.rows();
  args.first_query = draft_memory_->first_rows;
  args.keys_end = static_cast<int>(keys_end);
  if (draft_memory_->softmax)
    args.rows = draft_memory_->softmax + layer * static_cast<std::size_t>(config_.draft_rows()) *
                                             static_cast<std::size_t>(config_.query_heads);
  return args;
}

void KvCache::attend_drafts(std::uint32_t layer, const AttendedRows& to) const {
  if (!drafts_.any()) return;
  kvlab_prefill_args args = draft_attention(layer);
  args.out = to.out;
  args.lse = to.lse;
  args.workspace = draft_memory_->attention_workspace;
  check(prefill_attention(args, {.sinks = config_.layers[layer].sinks}, stream_),
        "attention over drafts");
  if (draft_memory_->plain_keys) keep_plain_keys_of_drafts(layer, attach_keys(to));
}

std::byte* KvCache::plain_keys_of_drafts(std::uint32_t layer) const {
  return draft_memory_->plain_keys + layer * static_cast<std::size_t>(config_.draft_rows()) *
                                         static_cast<std::size_t>(config_.kv_heads) *
                                         config_.key_bytes();
}

/// make_features() expects the same number of rows for every sequence. A sequence with fewer tokens
/// than the longest leaves its last rows unset.
void KvCache::keep_plain_keys_of_drafts(std::uint32_t layer, const AttendedRows& keys) const {
  const std::size_t width = static_cast<std::size_t>(config_.kv_heads) * config_.key_bytes(),
                    row = keys.key_row * bytes_of(config_.type),
                    longest = std::ranges::max(drafts_.tokens);
  std::size_t first = 0;
  for (std::size_t s = 0; s < drafts_.tokens.size(); first += drafts_.tokens[s++])
    cuda::copy_rows({plain_keys_of_drafts(layer) + s * longest * width, width},
                    {static_cast<const std::byte*>(keys.plain_keys) + first * row, row}, width,
                    drafts_.tokens[s], stream_);
}

void KvCache::accept_drafts(std::span<const std::uint32_t> accepted) {
  bool any = false;
  for (std::size_t s = 0; s < accepted.size(); ++s) any |= drafts_.has(s) && accepted[s] > 0;
  if (any) append_drafts(accepted);
  drafts_ = {};
}

void KvCache::append_drafts(std::span<const std::uint32_t> accepted) {
  write_appended(accepted, true);
  std::uint32_t tail = kNoTail;
  if (config_.kernels.weighted) {
    std::vector<float> weights(config_.draft_tokens);
    tail = config_.weigh(first_with_drafts().params, weights);
    copy_to_device(draft_memory_->weights, weights.data(), weights.size());
  }
  for (std::uint32_t layer = 0; layer < config_.layers.size(); ++layer) {
    if (config_.features.count > 0) make_features_of_drafts(layer);
    compact_drafts(layer, config_.observes() ? observe_drafts(layer, tail) : nullptr);
  }
  for (std::size_t s = 0; s < accepted.size(); ++s) {
    if (!drafts_.has(s) || accepted[s] == 0) continue;
    const auto sequence = static_cast<int>(s);
    for (std::uint32_t layer = 0; counts(sequence) && layer < config_.layers.size(); ++layer) {
      count_append(sequence, layer, accepted[s]);
      count_evictions(sequence, layer, false);
    }
  }
}

const SlotSequence& KvCache::first_with_drafts() const {
  std::size_t s = 0;
  while (s + 1 < sequences_.size() && !drafts_.has(s)) ++s;
  return sequences_[s];
}

/// Returns the attention that each token of the layer received from the queries of accepted tokens,
/// indexed by slots of all layers.
kvlab_observation* KvCache::observe_drafts(std::uint32_t layer, std::uint32_t tail) const {
  const std::int64_t first = slots_.range(layer, 0).first, end = slots_.end_of_layer(layer);
  clear(draft_memory_->seen, static_cast<std::size_t>(end - first));
  kvlab_observation* const seen = draft_memory_->seen - first;
  const kvlab_prefill_args queries = draft_attention(layer);
  check(observe_queries({.prefill = queries,
                         .needs = static_cast<kvlab_needs>(config_.kernels.needs),
                         .keys_end = queries.keys_end,
                         .threshold16 = storage_->thresholds,
                         .seen = seen,
                         .workspace = draft_memory_->observe_workspace,
                         .group_max = settings(0).modifiers.group == Modifiers::Group::max,
                         .weights = draft_memory_->weights,
                         .tail = tail,
                         .positions = draft_memory_->now,
                         .appended = draft_memory_->appended},
                        stream_),
        "what drafts give");
  return seen;
}

void KvCache::make_features_of_drafts(std::uint32_t layer) const {
  FeatureArgs args{config_.features};
  args.cache = storage_->cache(layer, static_cast<int>(sequences_.size()));
  args.slots = args.cache.lengths;
  args.tokens = static_cast<int>(std::ranges::max(drafts_.tokens));
  args.now = draft_memory_->now;
  args.keys = plain_keys_of_drafts(layer);
  args.key_row = std::int64_t{config_.kv_heads} * config_.head_size;
  args.unit_keys = storage_->unit_keys_of(layer, 0);
  args.to = storage_->features;
  args.output = config_.layers[layer].output;
  args.appended = draft_memory_->appended;
  check(make_features(args, stream_), "features");
}

/// Compacts the layer's caches of all sequences in place.
void KvCache::compact_drafts(std::uint32_t layer, kvlab_observation* seen) const {
  const kvlab_cache_view cache = storage_->cache(layer, static_cast<int>(sequences_.size()));
  kvlab_compact_args args{
      .from = cache,
      .to = cache,
      .policy = storage_->policy_of_compact(layer, 0, settings(0).modifiers.once),
      .to_states = storage_->states,
      .now = draft_memory_->now,
      .appended = draft_memory_->appended,
      .seen = seen,
      .workspace = draft_memory_->compact_workspace,
      .to_features = storage_->features};
  modify(args, 0, false);
  compact_rows(args, draft_memory_->ranks);
}

}  // namespace kvlab::kernels
