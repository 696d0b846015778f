#include "engine/cuda/cache/evicting_cache.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

#include "engine/cuda/fill.hpp"
#include "kernels/codes/codes.hpp"
#include "kernels/host/transfer.hpp"
#include "policies/budgets/layer_budgets.hpp"
#include "policies/executor.hpp"

namespace kvlab {
namespace {

using cuda::check;
using cuda::Placed;

template <class List>
const auto& named(const List& list, std::string_view policy) {
  for (const auto& entry : list)
    if (entry.name == policy) return entry;
  throw std::invalid_argument(
      fmt::format("policy {}: is not compiled for the device; --device cpu has it", policy));
}

/// Refuses caches that one launch cannot serve.
const std::vector<ResolvedConfig>& checked(const DeviceModel& model,
                                           const std::vector<ResolvedConfig>& caches) {
  const auto& first = caches.front();
  for (const ResolvedConfig& cache : caches) {
    check_held(kCudaDecoder, cache, model.config().heads());
    if (cache.policy.ladder.rungs.size() > kernels::kMostRungs)
      throw std::invalid_argument(fmt::format("ladder {}: the CUDA decoder has {} rungs at most",
                                              cache.policy.ladder.text(), kernels::kMostRungs));
    if (!side_by_side(cache, first))
      throw std::invalid_argument(
          "CUDA decoder: the sequences of a batch share one policy, its columns, and one kind of "
          "positions");
  }
  return caches;
}

PairSlots pair_slots(const DeviceModel& model, const CudaDecoderOptions& options) {
  return {model.config(), checked(model, options.caches), options.slots};
}

/// The fast kernels rotate whole heads, or none.
bool needs_plain(const DeviceModel& model, const CudaDecoderOptions& options) {
  const ModelConfig& config = model.config();
  const bool few_heads = config.query_heads <= kernels::kMostRungGroup * config.kv_heads;
  return options.plain_eviction ||
         (options.coded() && (model.dtype() == Dtype::f32 || !few_heads)) ||
         (options.rotation() != KeyRotation::by_position &&
          model.config().rope().rotated() != model.config().head_size);
}

/// As attention's workspaces depend on it.
kernels::SlotCache workspace_shape(const DeviceModel& model, const CudaDecoderOptions& options,
                                   int most_slots) {
  static constexpr kernels::CodedCache kRungs{};
  kernels::SlotCache shape = model.slot_cache(options.sequences, most_slots);
  if (options.coded()) shape.coded = &kRungs;
  return shape;
}

/// Null for a policy of the registry.
std::unique_ptr<kernels::PolicyKernels> compiled(const CudaDecoderOptions& options) {
  if (!options.entry()->source) return nullptr;
  return std::make_unique<kernels::PolicyKernels>(options.entry());
}

kernels::EvictionKernels eviction_kernels(const DeviceModel& model,
                                          const CudaDecoderOptions& options,
                                          const kernels::PolicyKernels* compiled) {
  const kernels::DevicePolicy& policy =
      compiled ? compiled->policy() : named(kernels::device_policies(), options.policy().name);
  return needs_plain(model, options) ? kernels::plain_kernels(policy)
                                     : kernels::observing_kernels(policy);
}

}  // namespace

EvictingCache::Work::Work(cuda::Arena& arena, const DeviceModel& model, const PairSlots& slots,
                          const CudaDecoderOptions& options) {
  const ModelConfig& config = model.config();
  const auto row_count = static_cast<std::size_t>(options.rows());
  q = arena.take<std::byte>(row_count * config.query_heads * model.key_bytes());
  const std::size_t halves = config.rope_tables() * config.head_size / 2;
  inv_freq = arena.take<float>(halves);
  rope = arena.take<float2>(row_count * halves);
  plain_k = arena.take<std::byte>(config.norms_each_head() && options.policy().column_count() > 0
                                      ? row_count * config.kv_heads * model.key_bytes()
                                      : 0);
  iota = arena.take<std::int32_t>(row_count);
  zeros = arena.take<std::int32_t>(row_count);
  nothing = arena.take<Admitted>(1);
  admitted = arena.take<Admitted>(1);
  ended = arena.take<Admitted>(1);
  // The same for every policy.
  const auto any =
      needs_plain(model, options) ? kernels::plain_kernels({}) : kernels::observing_kernels({});
  workspaces = arena.take<std::byte>(ObserverBranch::bytes(
      any, workspace_shape(model, options, slots.most()), static_cast<int>(config.layers)));
}

EvictingCache::EvictingCache(const DeviceModel& model, const BatchState& batch,
                             CudaDecoderOptions options, cudaStream_t stream)
    : model_(model),
      config_(model.config()),
      batch_(batch),
      options_(std::move(options)),
      stream_(stream),
      slots_(pair_slots(model, options_)),
      rotation_(options_.rotation()),
      compiled_(compiled(options_)),
      kernels_(eviction_kernels(model, options_, compiled_.get())),
      storage_("the cache's slots", model, slots_, options_),
      work_("attention", model, slots_, options_),
      rings_(model, batch, options_, stream),
      branch_(kernels_, workspace_shape(model, options_, slots_.most()),
              static_cast<int>(config_.layers), work_->workspaces, stream),
      counts_(slots_.first_slots().size()),
      shared_when_(options_.caches.size()) {
  storage_->clear(model, slots_, options_);
  for (std::size_t at = 0; options_.coded() && at < counts_.size(); ++at)
    on_rungs_.emplace_back(
        slots_.rungs(static_cast<std::uint32_t>(at / slots_.pairs()), at % slots_.pairs()));
  for (std::uint32_t table = 0; table < config_.rope_tables(); ++table)
    cuda::write(work_->inv_freq + table * config_.head_size / 2,
                config_.rope_of_table(table).inv_freq, "RoPE's frequencies");
  check(cuda::fill_iota(work_->iota, options_.rows(), stream), "a prompt");
  check(cudaMemsetAsync(work_->zeros, 0,
                        static_cast<std::size_t>(options_.rows()) * sizeof(std::int32_t), stream),
        "a prompt");
}

CacheBytes EvictingCache::bytes(const DeviceModel& model, const CudaDecoderOptions& options) {
  const PairSlots slots = pair_slots(model, options);
  CacheBytes bytes = SpanRings::bytes(model, options);
  bytes.storage += Placed<SlotStorage>::bytes(model, slots, options);
  bytes.work += Placed<Work>::bytes(model, slots, options);
  if (options.longest_prompt > 0)
    bytes.work += Placed<AdmissionMemory>::bytes(
        model, options, std::max(options.longest_prompt, static_cast<std::uint32_t>(slots.most())));
  return bytes;
}

BatchState::Row EvictingCache::row(std::uint32_t fed) const {
  const bool idle = fed == 0;
  return {.position = idle ? -1 : static_cast<std::int32_t>(fed),
          .slot = 0,
          .length = static_cast<std::int32_t>(idle ? 0 : fed + 1)};
}

std::uint32_t EvictingCache::prefill_chunk(int sequence) const {
  return options_.caches.at(static_cast<std::size_t>(sequence)).prefill.chunk;
}

std::uint64_t EvictingCache::live_bytes(int sequence, std::uint32_t fed) const {
  std::uint64_t live = 0, coded = 0;
  if (options_.coded()) {
    each_head(sequence, [&](std::uint32_t layer, std::size_t pair) {
      coded += counts_of(layer, pair).most_bytes;
    });
    return coded + rings_.live_bytes(fed);
  }
  each_head(sequence, [&](std::uint32_t layer, std::size_t pair) {
    if (counts(sequence))
      live += counts_of(layer, pair).most;
    else
      live += fed == 0 ? 0 : slots_.older(layer, pair, fed - 1) + 1;
  });
  return live * 2 * model_.key_bytes() + rings_.live_bytes(fed);
}

std::vector<std::vector<std::uint32_t>> EvictingCache::kept(int sequence, std::uint32_t fed) const {
  std::vector<std::vector<std::uint32_t>> kept(config_.layers);
  for (std::uint32_t layer = 0; layer < config_.layers; ++layer)
    if (rings_.has(layer)) kept[layer].assign(config_.kv_heads, rings_.kept(layer, fed));
  each_head(sequence, [&](std::uint32_t layer, std::size_t pair) {
    const bool counted = counts(sequence);
    kept[layer].push_back(counted   ? counts_of(layer, pair).live
                          : fed > 0 ? slots_.older(layer, pair, fed - 1) + 1
                                    : 0);
  });
  return kept;
}

std::uint64_t EvictingCache::evictions(int sequence, std::uint32_t behind) const {
  std::uint64_t left = 0;
  each_head(sequence, [&](std::uint32_t layer, std::size_t pair) {
    left += behind -
            (counts(sequence) ? counts_of(layer, pair).behind : slots_.older(layer, pair, behind));
  });
  return left;
}

void EvictingCache::pretend(int sequence, std::uint32_t tokens) {
  constexpr const char* kWhat = "drawing a cache";
  rings_.pretend(sequence);
  const auto copy = [&](auto* to, const auto* from, std::size_t count) {
    check(cudaMemcpyAsync(to, from, count * sizeof *from, cudaMemcpyHostToDevice, stream_), kWhat);
  };
  each_head(sequence, [&](std::uint32_t layer, std::size_t pair) {
    const std::size_t at = layer * slots_.pairs() + pair;
    const auto first = static_cast<std::size_t>(slots_.first_slots()[at]);
    const std::uint32_t live = slots_.older(layer, pair, tokens);
    counts_of(layer, pair) = {.live = live, .behind = live, .most = live};
    if (options_.coded()) storage_->rungs.pretend(slots_, at, pair, live);
    for (const bool key : {true, false}) {
      if (options_.coded()) break;
      check(
          cuda::fill_normal(
              model_.type(), (key ? storage_->keys : storage_->values) + first * model_.key_bytes(),
              std::size_t{live} * config_.head_size, 1.0f, first * 2 + (key ? 1 : 0), stream_),
          kWhat);
    }
    // The sinks and the youngest; with states of nothing seen, and columns of nothing brought.
    const std::uint32_t sinks = slots_.guards(layer, pair).sinks;
    std::vector<std::uint32_t> positions(live);
    for (std::uint32_t i = 0; i < live; ++i) positions[i] = i < sinks ? i : tokens - live + i;
    copy(storage_->positions + first, positions.data(), positions.size());
    const auto clear = [&](auto* all, std::size_t of_slot) {
      if (of_slot > 0)
        check(cudaMemsetAsync(all + first * of_slot, 0, live * of_slot * sizeof *all, stream_),
              kWhat);
    };
    clear(storage_->states, slot_bytes());
    clear(storage_->columns, columns());
    copy(storage_->lengths + at, &live, 1);
    copy(storage_->next_slots + at, &live, 1);
  });
  for (std::uint32_t layer = 0; layer < config_.layers; ++layer)
    if (rotation_ == KeyRotation::by_age && !rings_.has(layer))
      check(kernels::number_by_age(storage_->cache_of(layer, sequence), stream_), kWhat);
  check(cudaStreamSynchronize(stream_), kWhat);
}

EvictingCache::PlainKeys EvictingCache::plain_keys(const LayerOutputs& to) const {
  const std::size_t head = config_.head_size, kv = config_.kv_heads * head;
  if (config_.norms_each_head()) return {to.plain_k ? to.plain_k : work_->plain_k, kv};
  return {to.qkv + config_.query_heads * model_.key_bytes(), config_.query_heads * head + 2 * kv};
}

void EvictingCache::fill_ropes(const std::int32_t* positions, std::uint32_t first, int rows) const {
  if (rotation_ == KeyRotation::by_age && !config_.has_spans()) return;
  for (std::uint32_t table = 0; table < config_.rope_tables(); ++table) {
    const Rope& rope = config_.rope_of_table(table);
    check(cuda::fill_rope_rows(inv_freq(table), static_cast<int>(rope.inv_freq.size()), positions,
                               first, rows, rope.factor, rope_rows(table), stream_),
          "RoPE");
  }
}

/// Where keys are not rotated by age. `rows`: of the part or step.
void EvictingCache::rotate(std::uint32_t layer, const std::int32_t* rows,
                           kernels::RopeWriteArgs& args) const {
  const RowSpec& row = config_.rows[layer];
  args.q = work_->q;
  args.plain_k = work_->plain_k;
  if (rotation_ == KeyRotation::by_age && !rings_.has(layer)) return;
  args.rotated = static_cast<int>(row.rope.rotated());
  args.rope = rope_rows(row.table);
  args.positions = rows;
}

// --- Modifiers -----------------------------------------------------------------------------------

std::uint32_t EvictingCache::surplus(std::uint32_t layer, std::size_t pair,
                                     bool after_prompt) const {
  const std::uint32_t budget = slots_.budget(layer, pair);
  return budget == kNoBudget
             ? 0
             : slots_.modifiers(pair).surplus(counts_of(layer, pair).live, budget, after_prompt);
}

/// Live tokens at most while more are admitted behind `fed`, without those.
std::uint32_t EvictingCache::older(int sequence, std::uint32_t layer, std::size_t pair,
                                   std::uint32_t fed) const {
  return counts(sequence) ? counts_of(layer, pair).live : slots_.older(layer, pair, fed);
}

void EvictingCache::modify(kernels::ShrinkArgs& args, int sequence, bool after_prompt) const {
  const Modifiers& own = modifiers(sequence);
  args.by_layer = own.scope == Modifiers::Scope::layer;
  args.smooth = own.smooths(after_prompt) ? own.smooth : 0;
  args.pool = own.pool;
}

/// Where it lies, if room has to be made before more is admitted behind `fed`.
void EvictingCache::make_room(int sequence, std::uint32_t fed, bool after_prompt) {
  bool moves = false;
  each_head(sequence, [&](std::uint32_t layer, std::size_t pair) {
    const std::uint32_t own = surplus(layer, pair, after_prompt);
    counts_of(layer, pair).live -= own;
    moves |= own > 0;
    if (!options_.coded()) return;
    RungCounts& rungs = on_rungs_[layer * slots_.pairs() + pair];
    moves |= rungs.makes_room(slots_.modifiers(pair), slots_.budget(layer, pair), after_prompt);
    rungs.make_room(slots_.modifiers(pair), slots_.budget(layer, pair), after_prompt);
  });
  if (!moves) return;
  const AdmissionMemory& memory = reserve(static_cast<std::uint32_t>(slots_.most()));
  const Admitted nothing{fed, 0};
  check(cudaMemcpyAsync(work_->nothing, &nothing, sizeof nothing, cudaMemcpyHostToDevice, stream_),
        "making room");
  for (std::uint32_t layer = 0; layer < config_.layers; ++layer) {
    if (rings_.has(layer)) continue;
    shrink_in_place(sequence, layer, memory, after_prompt);
    if (rotation_ == KeyRotation::by_age)
      check(kernels::number_by_age(storage_->cache_of(layer, sequence), stream_),
            "numbering by age");
  }
}

/// On rungs by way of an admission's memory.
void EvictingCache::shrink_in_place(int sequence, std::uint32_t layer,
                                    const AdmissionMemory& memory, bool after_prompt) const {
  const kernels::SlotCache cache = storage_->cache_of(layer, sequence);
  kernels::ShrinkArgs args{.from = cache,
                           .to = cache,
                           .policy = storage_->policy_of_shrink(layer, sequence, false),
                           .to_states = storage_->states,
                           .to_columns = storage_->columns,
                           .now = &work_->nothing->now,
                           .admitted = &work_->nothing->tokens,
                           .seen = nullptr,
                           .workspace = memory.shrink_workspace};
  if (options_.coded()) {
    take_live(sequence, layer, memory, true);
    args.from = memory.cache;
    args.policy.states = memory.states;
    args.policy.columns = memory.columns;
  }
  shrink(args, sequence, layer, after_prompt);
}

void EvictingCache::take_live(int sequence, std::uint32_t layer, const AdmissionMemory& memory,
                              bool stays) const {
  shrink({.from = storage_->cache_of(layer, sequence),
          .to = memory.cache,
          .policy = storage_->policy_of_shrink(layer, sequence, stays),
          .to_states = memory.states,
          .to_columns = memory.columns,
          .now = &work_->nothing->now,
          .admitted = &work_->nothing->tokens,
          .seen = nullptr,
          .workspace = memory.shrink_workspace},
         sequence, layer, false);
}

void EvictingCache::shrink(kernels::ShrinkArgs args, int sequence, std::uint32_t layer,
                           bool after_prompt) const {
  modify(args, sequence, after_prompt);
  if (!options_.coded()) return check(kernels::shrink(kernels_, args, stream_), "a shrink");
  const kernels::CodedCache coded = storage_->rungs.coded(layer, sequence);
  const kernels::StagedCodes& staged = admission_->staged;
  if (args.to.keys == admission_->cache.keys) {
    args.from.coded = &coded;
    check(kernels::take_from_rungs(kernels_, args, staged, stream_), "tokens from their rungs");
  } else {
    args.to.coded = &coded;
    check(kernels::shrink_to_rungs(kernels_, args, staged, stream_), "tokens to their rungs");
  }
}

/// With the tokens that have just come.
void EvictingCache::count_bytes(std::uint32_t layer, std::size_t pair) {
  if (!options_.coded()) return;
  const RungCounts& rungs = on_rungs_[layer * slots_.pairs() + pair];
  std::uint64_t bytes = 0;
  for (std::size_t r = 0; r < rungs.ladder().size(); ++r) {
    const KvForm& form = *rungs.ladder()[r].form;
    bytes += rungs.on(r) * (form.exact() ? 2 * model_.key_bytes()
                                         : form.block_bytes() * config_.head_size / kCodeBlock);
  }
  counts_of(layer, pair).most_bytes = std::max(counts_of(layer, pair).most_bytes, bytes);
}

/// Tokens of an admission that makes room before it.
void EvictingCache::count_admission(int sequence, std::uint32_t layer, std::uint32_t tokens) {
  each_pair(sequence, [&](std::size_t pair) {
    Counts& own = counts_of(layer, pair);
    own.live -= surplus(layer, pair, false);
    own.behind = own.live;
    own.live += tokens;
    own.most = std::max(own.most, own.live);
    admit_to_rungs(layer, pair, tokens);
  });
}

/// Room that is made behind an admission.
void EvictingCache::count_room(int sequence, std::uint32_t layer, bool after_prompt) {
  each_pair(sequence, [&](std::size_t pair) {
    counts_of(layer, pair).live -= surplus(layer, pair, after_prompt);
    if (!options_.coded()) return;
    on_rungs_[layer * slots_.pairs() + pair].make_room(slots_.modifiers(pair),
                                                       slots_.budget(layer, pair), after_prompt);
    count_bytes(layer, pair);
  });
}

/// Room is made before them.
void EvictingCache::admit_to_rungs(std::uint32_t layer, std::size_t pair, std::uint32_t tokens) {
  if (!options_.coded()) return;
  RungCounts& rungs = on_rungs_[layer * slots_.pairs() + pair];
  rungs.make_room(slots_.modifiers(pair), slots_.budget(layer, pair), false);
  rungs.admit(tokens);
}

/// After a prompt, under ada(): splits a layer's slots among its KV heads by their ranks, and takes
/// the live tokens there, all of which the admission's memory holds. Waits. Returns how many those
/// were, [kv_head].
std::vector<std::int32_t> EvictingCache::share_slots(int sequence, std::uint32_t layer,
                                                     std::uint32_t fed) {
  constexpr const char* kWhat = "sharing slots";
  const AdmissionMemory& memory = *admission_;
  const Admitted ended{fed, 0};
  check(cudaMemcpyAsync(work_->ended, &ended, sizeof ended, cudaMemcpyHostToDevice, stream_),
        kWhat);
  kernels::ShrinkArgs args{.from = memory.cache,
                           .to = storage_->cache_of(layer, sequence),
                           .policy = storage_->policy_of_shrink(layer, sequence, false),
                           .to_states = storage_->states,
                           .to_columns = storage_->columns,
                           .now = &work_->ended->now,
                           .admitted = &work_->ended->tokens,
                           .seen = nullptr,
                           .workspace = memory.shrink_workspace};
  args.policy.states = memory.states;
  args.policy.columns = memory.columns;
  modify(args, sequence, true);
  check(kernels::rank_tokens(kernels_, args, stream_), kWhat);

  const std::size_t heads = config_.kv_heads,
                    row = static_cast<std::size_t>(memory.cache.most_slots);
  auto lengths = cuda::read(memory.cache.lengths, heads, stream_, kWhat);
  const auto positions = cuda::read(memory.cache.positions, heads * row, stream_, kWhat);
  const auto ranks = cuda::read(kernels::ranks_of(args), heads * row, stream_, kWhat);
  const std::size_t first = static_cast<std::size_t>(sequence) * heads;
  std::vector<std::vector<LeavingKey>> keys(heads);
  for (std::size_t head = 0; head < heads; ++head) {
    const Guards guards = slots_.guards(layer, first + head);
    const auto live = static_cast<std::size_t>(lengths[head]);
    for (std::size_t i = head * row; i < head * row + live; ++i)
      keys[head].push_back({guards.guard(positions[i], fed), ranks[i], positions[i]});
  }
  const std::uint32_t mean = options_.caches[static_cast<std::size_t>(sequence)].budget_tokens;
  slots_.share(layer, static_cast<std::size_t>(sequence), ada_budgets(keys, mean));
  storage_->write_pairs(slots_, layer * slots_.pairs() + first, heads);
  check(kernels::shrink(kernels_, args, stream_), kWhat);
  if (rotation_ == KeyRotation::by_age) check(kernels::number_by_age(args.to, stream_), kWhat);
  count_room(sequence, layer, true);
  shared_when_[static_cast<std::size_t>(sequence)] = fed;
  return lengths;
}

/// Where the prompt's last token came alone: by way of an admission's memory.
void EvictingCache::share_slots_of_live(int sequence, std::uint32_t fed) {
  const AdmissionMemory& memory = reserve(static_cast<std::uint32_t>(slots_.most()));
  const Admitted nothing{fed, 0};
  check(cudaMemcpyAsync(work_->nothing, &nothing, sizeof nothing, cudaMemcpyHostToDevice, stream_),
        "sharing slots");
  for (std::uint32_t layer = 0; layer < config_.layers; ++layer) {
    if (rings_.has(layer)) continue;
    take_live(sequence, layer, memory, true);
    share_slots(sequence, layer, fed);
  }
}

void EvictingCache::before_token(int sequence, std::uint32_t fed) {
  if (!counts(sequence)) return;
  if (!modifiers(sequence).steps_make_room()) make_room(sequence, fed, false);
  each_head(sequence, [&](std::uint32_t layer, std::size_t pair) {
    Counts& own = counts_of(layer, pair);
    own.live -= surplus(layer, pair, false);  // by the step itself
    own.behind = own.live++;
    own.most = std::max(own.most, own.live);
    admit_to_rungs(layer, pair, 1);
    count_bytes(layer, pair);
  });
}

void EvictingCache::end_prompt(int sequence, std::uint32_t fed) {
  if (shares_slots(sequence)) {
    if (shared_when_[static_cast<std::size_t>(sequence)] != fed) share_slots_of_live(sequence, fed);
  } else if (modifiers(sequence) != Modifiers{}) {
    make_room(sequence, fed, true);
  }
}

}  // namespace kvlab
