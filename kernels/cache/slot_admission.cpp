// Many tokens on their way into caches of slots. Layer by layer they attend in memory of the
// admission's own, behind those that were live; then those that stay go to their slots.
#include <algorithm>

#include "kernels/cache/slot_caches.hpp"
#include "kernels/host/transfer.hpp"

namespace kvlab::kernels {

using cuda::check;

AdmissionMemory::AdmissionMemory(cuda::Arena& arena, const SlotsConfig& config, std::uint32_t slots)
    : cache(config.slot_cache(1, static_cast<int>(slots))) {
  const auto heads = static_cast<std::size_t>(config.kv_heads), all = heads * slots;
  cache.keys = arena.take<std::byte>(all * config.key_bytes());
  cache.values = arena.take<std::byte>(all * config.key_bytes());
  cache.positions = arena.take<std::uint32_t>(all);
  cache.lengths = arena.take<std::int32_t>(heads);
  cache.next_slots = arena.take<std::int32_t>(heads);
  cache.first_slot = first_slots = arena.take<std::int64_t>(heads);
  states = arena.take<std::byte>(all * config.kernels.slot_bytes);
  if (config.columns.count > 0) {
    columns = arena.take<float>(all * static_cast<std::size_t>(config.columns.count));
    plain_keys = arena.take<std::byte>(all * config.key_bytes());
  }
  if (config.numbering != KVLAB_ORIGINAL)
    squeezed_keys = arena.take<std::byte>(all * config.key_bytes());
  if (config.kernels.weighted) weights = arena.take<float>(slots);
  if (config.observes()) {
    seen = arena.take<kvlab_observation>(all);
    rows = arena.take<RowSoftmax>(std::size_t{config.part} *
                                  static_cast<std::size_t>(config.query_heads));
    observe_workspace = arena.take<std::byte>(kernels::observe_workspace(
        {.query_heads = config.query_heads, .queries = static_cast<int>(config.part)}));
  }
  if (config.coded()) {
    const std::size_t channels = all * 2 * static_cast<std::size_t>(config.head_size);
    staged.rungs = arena.take<std::int8_t>(all);
    staged.codes = arena.take<std::uint8_t>(channels);
    staged.metadata = arena.take<std::uint32_t>(channels / kCodeBlock);
  }
  shrink_workspace = arena.take<std::byte>(kernels::shrink_workspace(cache));
}

const AdmissionMemory& SlotCaches::reserve(std::uint32_t slots) {
  slots = std::max(slots, static_cast<std::uint32_t>(slots_.most()));
  if (static_cast<int>(slots) <= memory_->cache.most_slots) return *memory_;
  check(cudaStreamSynchronize(stream_), "an admission");
  memory_ = {};  // first give back, then take
  memory_ = cuda::Placed<AdmissionMemory>("an admission", config_, slots);
  std::vector<std::int64_t> first;
  for (int head = 0; head < config_.kv_heads; ++head) first.push_back(std::int64_t{head} * slots);
  cuda::write(memory_->first_slots, first, "an admission");
  return *memory_;
}

void SlotCaches::begin(int sequence, std::uint32_t fed, std::uint32_t tokens, bool ends_prompt) {
  // What steps do not, so that nobody who is to step down attends as it was.
  if (coded() && !of(sequence).modifiers.steps_make_room()) make_room(sequence, fed, false, {});
  // In two frames nothing is numbered anew until something has left.
  const bool squeezes =
      config_.numbering == KVLAB_SQUEEZED || (config_.numbering == KVLAB_TWO_FRAMES && fed > 0);
  admission_ = {sequence, fed, tokens, ends_prompt, squeezes};
  reserve(admitted_slots());
  const Admitted nothing{fed, 0}, all{fed, tokens};
  copy(work_->nothing, &nothing, 1);
  copy(work_->admitted, &all, 1);
  if (config_.kernels.weighted) copy_weights();
}

/// For live and new tokens together.
std::uint32_t SlotCaches::admitted_slots() const {
  std::uint32_t live = 0;
  each_head(admission_.sequence, [&](std::uint32_t layer, std::size_t pair) {
    live = std::max(live, older(admission_.sequence, layer, pair, admission_.fed));
  });
  return live + admission_.tokens;
}

void SlotCaches::copy_weights() {
  std::vector<float> weights(admission_.tokens);
  admission_.tail = config_.weigh(of(admission_.sequence).params, weights);
  copy(memory_->weights, weights.data(), weights.size());
}

RopeWriteArgs SlotCaches::write(std::uint32_t layer, const AdmissionPart& part) {
  if (part.first == 0) begin_layer(layer);
  RopeWriteArgs args{};
  args.sequences = work_->zeros;
  args.slots = work_->iota;
  // The part's slots begin behind those of the parts before it.
  const std::size_t ahead = part.first * config_.key_bytes();
  args.cache = memory_->cache;
  args.cache.keys = static_cast<std::byte*>(args.cache.keys) + ahead;
  args.cache.values = static_cast<std::byte*>(args.cache.values) + ahead;
  args.cache.next_slots = args.cache.lengths;  // new tokens go behind the live ones
  args.q = work_->q;
  args.plain_k = work_->plain_k;
  if (config_.numbering != KVLAB_SQUEEZED) rotate(config_.layers[layer].table, args);
  return args;
}

/// The live tokens come along; a victim that was chosen already is chosen again.
void SlotCaches::begin_layer(std::uint32_t layer) {
  const kvlab_cache& cache = memory_->cache;
  const std::size_t all =
      static_cast<std::size_t>(cache.kv_heads) * static_cast<std::size_t>(cache.most_slots);
  if (memory_->seen) clear(memory_->seen, all);
  if (memory_->staged.rungs)  // -1: as computed
    check(cudaMemsetAsync(memory_->staged.rungs, -1, all, stream_), "an admission");
  if (admission_.fed == 0) {
    clear(cache.lengths, static_cast<std::size_t>(cache.kv_heads));
    clear(cache.next_slots, static_cast<std::size_t>(cache.kv_heads));
    return;
  }
  take_live(admission_.sequence, layer, of(admission_.sequence).modifiers.once);
  if (admission_.squeezes) squeeze_keys(squeeze_shape(layer, {.first = 0, .rows = 0}), true);
}

void SlotCaches::attend(std::uint32_t layer, const AdmissionPart& part, const AttendedRows& to) {
  if (admission_.squeezes) {
    const SqueezeArgs shape = squeeze_shape(layer, part);
    if (config_.numbering == KVLAB_SQUEEZED)
      check(squeeze_queries(shape, work_->q, work_->q, stream_), "positions of a prompt");
    squeeze_keys(shape, false);
  }
  const kvlab_prefill_args queries{.type = config_.type,
                                   .query_heads = config_.query_heads,
                                   .kv_heads = config_.kv_heads,
                                   .head_size = config_.head_size,
                                   .softmax_scale = config_.layers[layer].softmax_scale,
                                   .first = static_cast<int>(part.first),
                                   .queries = part.rows,
                                   .q = work_->q,
                                   .keys = attended_keys(),
                                   .values = memory_->cache.values,
                                   .first_slot = memory_->first_slots,
                                   .older = memory_->cache.lengths,
                                   .out = to.out,
                                   .lse = to.lse,
                                   .rows = memory_->rows};
  check(prefill_attention(queries, {.sinks = config_.layers[layer].sinks}, stream_),
        "prefill attention");
  if (config_.observes()) observe(layer, queries);
  if (memory_->columns) keep_plain_keys(part, to);
  if (part.first + static_cast<std::uint32_t>(part.rows) == admission_.tokens) keep(layer);
}

/// What the part's queries give to each key.
void SlotCaches::observe(std::uint32_t layer, const kvlab_prefill_args& queries) {
  const int sequence = admission_.sequence;
  const auto first = static_cast<std::uint32_t>(queries.first),
             end = first + static_cast<std::uint32_t>(queries.queries);
  std::uint32_t live = 0;
  each_pair(sequence, [&](std::size_t pair) {
    live = std::max(live, older(sequence, layer, pair, admission_.fed));
  });
  check(observe_queries({.prefill = queries,
                         .needs = static_cast<kvlab_needs>(config_.kernels.needs),
                         .keys_end = static_cast<int>(live + end),
                         .position = admission_.fed + first,
                         .threshold16 = storage_->thresholds + sequence,
                         .seen = memory_->seen,
                         .workspace = memory_->observe_workspace,
                         .group_max = of(sequence).modifiers.group == Modifiers::Group::max,
                         .weights = memory_->weights,
                         .tail = admission_.tail,
                         .younger = static_cast<int>(admission_.tokens - end)},
                        stream_),
        "what a prompt's queries give");
}

/// Those that stay go to their slots.
void SlotCaches::keep(std::uint32_t layer) {
  const int sequence = admission_.sequence;
  const bool ends_prompt = admission_.ends_prompt, once = of(sequence).modifiers.once;
  if (memory_->columns) make_columns_of_new(layer);
  if (counts(sequence)) count_admission(sequence, layer, admission_.tokens);
  kvlab_shrink_args args = to_slots(sequence, layer, work_->admitted, once && !ends_prompt);
  args.seen = memory_->seen;
  if (ends_prompt && of(sequence).share) return keep_by_shares(layer, args);
  shrink(args, sequence, layer, ends_prompt);
  number(args.to);
  if (counts(sequence)) count_room(sequence, layer, ends_prompt);
}

/// All are admitted where they are; then the heads share their slots.
void SlotCaches::keep_by_shares(std::uint32_t layer, kvlab_shrink_args args) {
  const int sequence = admission_.sequence;
  args.to = args.from;
  args.to_states = memory_->states;
  args.to_columns = memory_->columns;
  args.policy.room_at = storage_->policy_of_shrink(layer, sequence, true).room_at;
  shrink(args, sequence, layer, false);
  auto older = share_slots(sequence, layer, admission_.fed + admission_.tokens);
  for (std::int32_t& live : older) live -= static_cast<std::int32_t>(admission_.tokens);
  copy(memory_->cache.lengths, older.data(), older.size());  // as whoever watches expects them
}

/// Those of a part, for when all of the admission's are there.
void SlotCaches::keep_plain_keys(const AdmissionPart& part, const AttendedRows& to) {
  const AttendedRows keys = with_keys(to);
  const std::size_t width = static_cast<std::size_t>(config_.kv_heads) * config_.key_bytes();
  cuda::copy_rows(
      {memory_->plain_keys + part.first * width, width},
      {static_cast<const std::byte*>(keys.plain_keys), keys.key_row * bytes_of(config_.type)},
      width, static_cast<std::size_t>(part.rows), stream_);
}

void SlotCaches::make_columns_of_new(std::uint32_t layer) {
  ColumnArgs args{config_.columns};
  args.cache = memory_->cache;
  args.slots = memory_->cache.lengths;
  args.tokens = static_cast<int>(admission_.tokens);
  args.keys = memory_->plain_keys;
  args.key_row = std::int64_t{config_.kv_heads} * config_.head_size;
  args.unit_keys = storage_->unit_keys_of(layer, admission_.sequence);
  args.to = memory_->columns;
  args.output = config_.layers[layer].output;
  check(make_columns(args, stream_), "columns");
}

/// The older keys, or a part's new ones.
void SlotCaches::squeeze_keys(const SqueezeArgs& shape, bool of_older) {
  check(kernels::squeeze_keys({.shape = shape,
                               .slots = memory_->cache.most_slots,
                               .positions = memory_->cache.positions,
                               .rotated = config_.numbering == KVLAB_TWO_FRAMES,
                               .now = admission_.fed,
                               .keys = memory_->cache.keys,
                               .to = memory_->squeezed_keys},
                              of_older, stream_),
        "positions of a prompt");
}

SqueezeArgs SlotCaches::squeeze_shape(std::uint32_t layer, const AdmissionPart& part) const {
  const std::uint32_t table = config_.layers[layer].table;
  const SlotRope& rope = config_.ropes[table];
  const bool two_frames = config_.numbering == KVLAB_TWO_FRAMES;
  return {.type = config_.type,
          .query_heads = config_.query_heads,
          .kv_heads = config_.kv_heads,
          .head_size = config_.head_size,
          .rotated = rope.rotated(),
          .inv_freq = inv_freq(table),
          .rope_factor = two_frames ? 1 : rope.factor,
          .older = memory_->cache.lengths,
          .first = static_cast<int>(part.first),
          .tokens = part.rows};
}

}  // namespace kvlab::kernels
