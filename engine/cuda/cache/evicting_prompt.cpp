// Many tokens on their way into a cache that evicts. Layer by layer they attend in memory of the
// admission's own, behind those that were live; then those that stay go to their slots.
#include <algorithm>

#include "engine/cuda/cache/evicting_cache.hpp"
#include "engine/cuda/fill.hpp"
#include "kernels/evict/squeeze.hpp"
#include "kernels/host/transfer.hpp"

namespace kvlab {

using cuda::check;

AdmissionMemory::AdmissionMemory(cuda::Arena& arena, const DeviceShape& model,
                                 const CudaDecoderOptions& options, std::uint32_t slots)
    : cache(model.slot_cache(1, static_cast<int>(slots))) {
  const ModelConfig& config = model.config();
  const std::size_t heads = config.kv_heads, all = heads * slots;
  const bool observes = options.observes();
  cache.keys = arena.take<std::byte>(all * model.key_bytes());
  cache.values = arena.take<std::byte>(all * model.key_bytes());
  cache.positions = arena.take<std::uint32_t>(all);
  cache.lengths = arena.take<std::int32_t>(heads);
  cache.next_slots = arena.take<std::int32_t>(heads);
  cache.first_slot = first_slots = arena.take<std::int64_t>(heads);
  states = arena.take<std::byte>(all * options.entry()->slot_bytes);
  if (const std::size_t count = options.policy().column_count(); count > 0) {
    columns = arena.take<float>(all * count);
    plain_keys = arena.take<std::byte>(all * model.key_bytes());
  }
  if (options.rotation() != KeyRotation::by_position)
    squeezed_keys = arena.take<std::byte>(all * model.key_bytes());
  if (options.policy().weighted) weights = arena.take<float>(slots);
  if (observes) {
    seen = arena.take<Observation>(all);
    rows =
        arena.take<kernels::RowSoftmax>(std::size_t{options.prefill_tokens} * config.query_heads);
    observe_workspace = arena.take<std::byte>(kernels::observe_workspace(
        model.attention_shape(static_cast<int>(slots)), static_cast<int>(options.prefill_tokens)));
  }
  if (options.coded()) {
    staged.rungs = arena.take<std::int8_t>(all);
    staged.codes = arena.take<std::uint8_t>(all * 2 * config.head_size);
    staged.metadata = arena.take<std::uint32_t>(all * 2 * config.head_size / kCodeBlock);
  }
  shrink_workspace = arena.take<std::byte>(kernels::shrink_workspace(cache));
}

const AdmissionMemory& EvictingCache::reserve(std::uint32_t slots) {
  if (static_cast<int>(slots) <= admission_->cache.most_slots) return *admission_;
  check(cudaStreamSynchronize(stream_), "an admission");
  admission_ = {};  // first give back, then take
  admission_ = cuda::Placed<AdmissionMemory>("an admission", model_, options_, slots);
  std::vector<std::int64_t> first;
  for (std::uint32_t head = 0; head < config_.kv_heads; ++head)
    first.push_back(std::int64_t{head} * slots);
  cuda::write(admission_->first_slots, first, "an admission");
  return *admission_;
}

class EvictingCache::Prompt final : public DeviceAdmission {
 public:
  Prompt(EvictingCache& cache, int sequence, std::uint32_t fed, std::uint32_t tokens,
         bool ends_prompt)
      : DeviceAdmission(cache.config_.layers, tokens),
        cache_(cache),
        options_(cache.options_.caches[static_cast<std::size_t>(sequence)]),
        sequence_(sequence),
        fed_(fed),
        ends_prompt_(ends_prompt),
        // In two frames nothing is numbered anew until something has left.
        squeezes_(cache.rotation_ == KeyRotation::by_age ||
                  (cache.rotation_ == KeyRotation::two_frames && fed > 0)),
        memory_(cache.reserve(most_slots())) {
    const Admitted nothing{fed, 0}, all{fed, tokens};
    copy(cache.work_->nothing, &nothing, 1);
    copy(cache.work_->admitted, &all, 1);
    if (cache.options_.policy().weighted) copy_weights();
  }

 private:
  kernels::RopeWriteArgs write_part(std::uint32_t layer, const PromptPart& part) override {
    const bool is_all = part.rows == static_cast<int>(tokens());
    if (layer == 0 || !is_all) cache_.fill_ropes(nullptr, fed_ + part.first, part.rows);
    const Work& work = *cache_.work_;
    if (cache_.rings_.has(layer)) {
      kernels::RopeWriteArgs args = cache_.rings_.write(layer, sequence_, fed_ + part.first);
      cache_.rotate(layer, work.iota, args);
      return args;
    }
    if (part.first == 0) take_live(layer);
    kernels::RopeWriteArgs args{};
    args.sequences = work.zeros;
    args.slots = work.iota;
    // The part's slots begin behind those of the parts before it.
    const std::size_t ahead = part.first * cache_.model_.key_bytes();
    args.keys = static_cast<std::byte*>(memory_.cache.keys) + ahead;
    args.values = static_cast<std::byte*>(memory_.cache.values) + ahead;
    args.next = {.first_slot = memory_.cache.first_slot,
                 .next_slots = memory_.cache.lengths,
                 .positions = nullptr,
                 .now = nullptr};
    cache_.rotate(layer, work.iota, args);
    return args;
  }

  void attend_part(std::uint32_t layer, const PromptPart& part, const LayerOutputs& to) override {
    if (cache_.rings_.has(layer))
      return cache_.rings_.attend(layer, sequence_, fed_ + part.first, part.rows, cache_.work_->q,
                                  to);
    if (squeezes_) {
      const kernels::SqueezeArgs shape = squeeze_shape(part);
      if (cache_.rotation_ == KeyRotation::by_age)
        check(kernels::squeeze_queries(shape, cache_.work_->q, cache_.work_->q, cache_.stream_),
              "positions of a prompt");
      squeeze_keys(shape, false);
    }
    check(kernels::prefill_attention({.shape = shape(layer),
                                      .first = static_cast<int>(part.first),
                                      .queries = part.rows,
                                      .q = cache_.work_->q,
                                      .keys = attended_keys(),
                                      .values = memory_.cache.values,
                                      .out = to.out,
                                      .lse = to.lse,
                                      .rows = memory_.rows,
                                      .older = memory_.cache.lengths},
                                     cache_.stream_),
          "prefill attention");
    if (cache_.options_.observes()) observe(layer, part);
    if (memory_.columns) keep_plain_keys(part, to);
    if (part.first + static_cast<std::uint32_t>(part.rows) == tokens()) keep(layer);
  }

  /// The live tokens come along; a victim that was chosen already is chosen again.
  void take_live(std::uint32_t layer) {
    const kernels::SlotCache& cache = memory_.cache;
    if (memory_.seen)
      clear(memory_.seen,
            static_cast<std::size_t>(cache.kv_heads) * static_cast<std::size_t>(cache.most_slots));
    if (memory_.staged.rungs)  // -1: as computed
      check(cudaMemsetAsync(memory_.staged.rungs, -1,
                            static_cast<std::size_t>(cache.kv_heads) *
                                static_cast<std::size_t>(cache.most_slots),
                            cache_.stream_),
            "an admission");
    if (fed_ == 0) {
      clear(cache.lengths, static_cast<std::size_t>(cache.kv_heads));
      clear(cache.next_slots, static_cast<std::size_t>(cache.kv_heads));
      return;
    }
    cache_.take_live(sequence_, layer, memory_, is_once());
    if (squeezes_) squeeze_keys(squeeze_shape({.first = 0, .rows = 0}), true);
  }

  /// What the part's queries give to each key.
  void observe(std::uint32_t layer, const PromptPart& part) {
    const std::uint32_t end = part.first + static_cast<std::uint32_t>(part.rows);
    const std::size_t first_pair = static_cast<std::size_t>(sequence_) * cache_.config_.kv_heads;
    std::uint32_t older = 0;
    for (std::size_t head = 0; head < cache_.config_.kv_heads; ++head)
      older = std::max(older, cache_.older(sequence_, layer, first_pair + head, fed_));
    check(kernels::observe_queries(
              {.shape = shape(layer),
               .needs = cache_.options_.policy().needs,
               .first = static_cast<int>(part.first),
               .queries = part.rows,
               .keys_end = static_cast<int>(older + end),
               .younger = static_cast<int>(tokens() - end),
               .position = fed_ + part.first,
               .q = cache_.work_->q,
               .keys = attended_keys(),
               .rows = memory_.rows,
               .older = memory_.cache.lengths,
               .weights = memory_.weights,
               .tail = tail_,
               .group_max = options_.policy.modifiers.group == Modifiers::Group::max,
               .threshold16 = cache_.storage_->thresholds + sequence_,
               .seen = memory_.seen,
               .workspace = memory_.observe_workspace},
              cache_.stream_),
          "what a prompt's queries give");
  }

  /// Those that stay go to their slots.
  void keep(std::uint32_t layer) {
    const kernels::SlotCache to = cache_.storage_->cache_of(layer, sequence_);
    kernels::PolicyState policy =
        cache_.storage_->policy_of_shrink(layer, sequence_, is_once() && !ends_prompt_);
    policy.states = memory_.states;
    policy.columns = memory_.columns;
    if (memory_.columns) make_columns(layer);
    if (cache_.counts(sequence_)) cache_.count_admission(sequence_, layer, tokens());
    kernels::ShrinkArgs args{.from = memory_.cache,
                             .to = to,
                             .policy = policy,
                             .to_states = cache_.storage_->states,
                             .to_columns = cache_.storage_->columns,
                             .now = &cache_.work_->admitted->now,
                             .admitted = &cache_.work_->admitted->tokens,
                             .seen = memory_.seen,
                             .workspace = memory_.shrink_workspace};
    if (ends_prompt_ && cache_.shares_slots(sequence_)) {
      keep_by_shares(layer, args);
      return;
    }
    cache_.shrink(args, sequence_, layer, ends_prompt_);
    if (cache_.rotation_ == KeyRotation::by_age)
      check(kernels::number_by_age(to, cache_.stream_), "numbering by age");
    if (cache_.counts(sequence_)) cache_.count_room(sequence_, layer, ends_prompt_);
  }

  /// All are admitted where they are; then the heads share their slots.
  void keep_by_shares(std::uint32_t layer, kernels::ShrinkArgs args) {
    args.to = args.from;
    args.to_states = memory_.states;
    args.to_columns = memory_.columns;
    args.policy.room_at = cache_.storage_->policy_of_shrink(layer, sequence_, true).room_at;
    cache_.shrink(args, sequence_, layer, false);
    std::vector<std::int32_t> older = cache_.share_slots(sequence_, layer, fed_ + tokens());
    for (std::int32_t& live : older) live -= static_cast<std::int32_t>(tokens());
    copy(memory_.cache.lengths, older.data(), older.size());  // as whoever watches expects them
  }

  /// Those of a part, for when all of the admission's are there.
  void keep_plain_keys(const PromptPart& part, const LayerOutputs& to) {
    const PlainKeys keys = cache_.plain_keys(to);
    const std::size_t width = cache_.config_.kv_heads * cache_.model_.key_bytes();
    cuda::copy_rows({memory_.plain_keys + part.first * width, width},
                    {keys.first, keys.row * bytes_of(cache_.model_.dtype())}, width,
                    static_cast<std::size_t>(part.rows), cache_.stream_);
  }

  void make_columns(std::uint32_t layer) {
    const kernels::SlotCache& cache = memory_.cache;
    check(kernels::make_columns({.cache = cache,
                                 .columns = cache_.options_.columns(),
                                 .slots = cache.lengths,
                                 .tokens = static_cast<int>(tokens()),
                                 .now = nullptr,
                                 .keys = memory_.plain_keys,
                                 .key_row = std::int64_t{cache.kv_heads} * cache.head_size,
                                 .unit_keys = cache_.storage_->unit_keys_of(layer, sequence_),
                                 .to = memory_.columns,
                                 .output = cache_.model_.weights().layers[layer].output.weight,
                                 .hidden = static_cast<int>(cache_.config_.hidden)},
                                cache_.stream_),
          "columns");
  }

  /// Room is made only behind a prompt segment.
  bool is_once() const { return options_.policy.modifiers.once; }

  /// The older keys, or a part's new ones.
  void squeeze_keys(const kernels::SqueezeArgs& shape, bool of_older) {
    check(kernels::squeeze_keys({.shape = shape,
                                 .slots = memory_.cache.most_slots,
                                 .positions = memory_.cache.positions,
                                 .rotated = cache_.rotation_ == KeyRotation::two_frames,
                                 .now = fed_,
                                 .keys = memory_.cache.keys,
                                 .to = memory_.squeezed_keys},
                                of_older, cache_.stream_),
          "positions of a prompt");
  }

  kernels::SqueezeArgs squeeze_shape(const PromptPart& part) const {
    const ModelConfig& config = cache_.config_;
    const bool two_frames = cache_.rotation_ == KeyRotation::two_frames;
    return {.type = cache_.model_.type(),
            .query_heads = static_cast<int>(config.query_heads),
            .kv_heads = static_cast<int>(config.kv_heads),
            .head_size = static_cast<int>(config.head_size),
            .rotated = static_cast<int>(config.rope().rotated()),
            .inv_freq = cache_.inv_freq(config.unspanned().table),
            .rope_factor = two_frames ? 1 : config.rope().factor,
            .older = memory_.cache.lengths,
            .first = static_cast<int>(part.first),
            .tokens = part.rows};
  }

  kernels::AttentionShape shape(std::uint32_t layer) const {
    return cache_.model_.attention_shape(memory_.cache.most_slots, layer);
  }
  const void* attended_keys() const {
    return squeezes_ ? memory_.squeezed_keys : memory_.cache.keys;
  }

  /// For live and new tokens together. A shrink looks at every slot of the cache that it takes the
  /// live ones from.
  std::uint32_t most_slots() const {
    std::uint32_t older = 0;
    cache_.each_head(sequence_, [&](std::uint32_t layer, std::size_t pair) {
      older = std::max(older, cache_.older(sequence_, layer, pair, fed_));
    });
    return std::max(older + tokens(), static_cast<std::uint32_t>(cache_.slots_.most()));
  }

  void copy_weights() {
    const PolicyEntry& entry = *options_.policy.entry;
    const auto params = options_.policy.packed_params();
    tail_ = entry.tail(params.data());
    std::vector<float> weights;
    for (std::uint32_t age = 0; age < tokens(); ++age)
      weights.push_back(age < tail_ ? entry.weight(age, params.data()) : 0.0f);
    copy(memory_.weights, weights.data(), weights.size());
  }

  template <class T>
  void copy(T* to, const T* from, std::size_t count) {
    check(cudaMemcpyAsync(to, from, count * sizeof(T), cudaMemcpyHostToDevice, cache_.stream_),
          "an admission");
  }
  template <class T>
  void clear(T* part, std::size_t count) {
    check(cudaMemsetAsync(part, 0, count * sizeof(T), cache_.stream_), "an admission");
  }

  EvictingCache& cache_;
  const ResolvedConfig& options_;
  int sequence_;
  std::uint32_t fed_;
  bool ends_prompt_;
  bool squeezes_;  ///< keys are read rotated by age
  const AdmissionMemory& memory_;
  std::uint32_t tail_ = kNoTail;
};

std::unique_ptr<DeviceAdmission> EvictingCache::admit(int sequence, std::uint32_t fed,
                                                      std::uint32_t tokens, bool ends_prompt) {
  // What steps do not, so that nobody who is to step down attends as it was.
  if (options_.coded() && !modifiers(sequence).steps_make_room()) make_room(sequence, fed, false);
  return std::make_unique<Prompt>(*this, sequence, fed, tokens, ends_prompt);
}

}  // namespace kvlab
