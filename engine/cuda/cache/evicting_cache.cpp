#include "engine/cuda/cache/evicting_cache.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

#include "engine/cuda/fill.hpp"
#include "kernels/host/transfer.hpp"
#include "kernels/evict/squeeze.hpp"

namespace kvlab {
namespace {

using cuda::check;
using cuda::DeviceBuffer;

constexpr std::uint32_t kLongestSequence = 1u << 31;  // tokens

template <class List>
const auto& named(const List& list, std::string_view policy) {
  for (const auto& entry : list)
    if (entry.name == policy) return entry;
  throw std::invalid_argument(
      fmt::format("policy {}: is not compiled for the device; --device cpu has it", policy));
}

/// Refuses caches that one launch cannot serve.
const std::vector<CacheOptions>& checked(const std::vector<CacheOptions>& caches) {
  const auto& first = caches.front();
  for (const CacheOptions& cache : caches) {
    if (!cache.policy.entry)
      throw std::invalid_argument(fmt::format(
          "policy {} is a reference of the replay; a decoder needs a policy", cache.policy.name));
    if (cache.policy.entry != first.policy.entry || cache.positions != first.positions)
      throw std::invalid_argument(
          "CUDA decoder: the sequences of a batch share one policy and one kind of positions");
  }
  return caches;
}

std::size_t key_bytes(const DeviceModel& model, std::int64_t slots) {
  return static_cast<std::size_t>(slots) * model.config().head_size * bytes_of(model.dtype());
}

std::size_t q_bytes(const DeviceModel& model, const EvictingCache::Options& options) {
  const auto rows =
      std::max<std::size_t>(static_cast<std::size_t>(options.part_tokens), options.caches.size());
  return rows * model.config().query_heads * model.config().head_size * bytes_of(model.dtype());
}

/// The fast kernels turn whole heads, or none.
bool needs_plain(const DeviceModel& model, const EvictingCache::Options& options) {
  return options.plain ||
         (options.squeezed() && model.config().rope.rotated() != model.config().head_size);
}

const std::shared_ptr<const PolicyEntry>& entry_of(const EvictingCache::Options& options) {
  return options.caches.front().policy.entry;
}

/// Null for a policy of the registry.
std::unique_ptr<kernels::PolicyKernels> compiled(const EvictingCache::Options& options) {
  if (!entry_of(options)->source) return nullptr;
  return std::make_unique<kernels::PolicyKernels>(entry_of(options));
}

kernels::EvictionKernels eviction_kernels(const DeviceModel& model,
                                          const EvictingCache::Options& options,
                                          const kernels::PolicyKernels* compiled) {
  const bool plain = needs_plain(model, options);
  if (compiled) return plain ? compiled->plain() : compiled->observing();
  return named(plain ? kernels::plain_eviction() : kernels::observing_eviction(),
               entry_of(options)->info.name);
}

AdmissionMemory::Need admission_need(const EvictingCache::Options& options) {
  const PolicyEntry& policy = *entry_of(options);
  return {.squeezed = options.squeezed(),
          .observes = policy.info.needs != Needs::nothing,
          .slot_bytes = policy.slot_bytes,
          .part_tokens = options.part_tokens};
}

kernels::AdmissionPolicy admission_policy(const EvictingCache::Options& options,
                                          const kernels::PolicyKernels* compiled) {
  if (compiled) return compiled->admission();
  return named(kernels::admission_policies(), entry_of(options)->info.name);
}

/// The same for every policy.
std::size_t attention_bytes(const DeviceModel& model, const EvictingCache::Options& options,
                            const kernels::SlotCache& cache) {
  const auto any =
      needs_plain(model, options) ? kernels::plain_kernels({}) : kernels::observing_kernels({});
  return ObservedAttention::bytes(any, cache, static_cast<int>(model.config().layers));
}

}  // namespace

EvictingCache::EvictingCache(const DeviceModel& model, const BatchState& batch, Options options,
                             cudaStream_t stream)
    : model_(model),
      config_(model.config()),
      batch_(batch),
      options_(std::move(options)),
      stream_(stream),
      slots_(config_, checked(options_.caches), options_.most_tokens),
      compiled_(compiled(options_)),
      kernels_(eviction_kernels(model, options_, compiled_.get())),
      admission_kernels_(admission_policy(options_, compiled_.get())) {
  const std::int64_t total = slots_.total();
  const auto slots = static_cast<std::size_t>(total);
  keys_ = DeviceBuffer(key_bytes(model, total), "the cache's keys");
  values_ = DeviceBuffer(key_bytes(model, total), "the cache's values");
  positions_ = DeviceBuffer(slots * sizeof(std::uint32_t), "the cache's positions");
  states_ = DeviceBuffer(slots * kernels_.slot_bytes, "the policy's states");
  if (options_.watched && policy().needs != Needs::nothing)
    seen_ = DeviceBuffer(slots * sizeof(Observation), "what tokens receive");
  if (options_.turns_by_age())
    ages_ = DeviceBuffer(slots * sizeof(std::uint32_t), "the cache's ages");
  first_slots_ = cuda::upload(slots_.first_slots(), "the cache's slots");
  const std::size_t words = slots_.first_slots().size() * sizeof(std::int32_t);
  lengths_ = DeviceBuffer(words, "the cache's lengths");
  next_slots_ = DeviceBuffer(words, "the cache's lengths");
  check(cudaMemsetAsync(lengths_.data(), 0, words, stream), "the cache's lengths");
  check(cudaMemsetAsync(next_slots_.data(), 0, words, stream), "the cache's lengths");
  fill_rules();

  q_ = DeviceBuffer(q_bytes(model, options_), "queries");
  inv_freq_ = cuda::upload(config_.rope.inv_freq, "RoPE's frequencies");
  const auto rows = std::max(options_.part_tokens, static_cast<int>(options_.caches.size()));
  turns_ = DeviceBuffer(
      static_cast<std::size_t>(rows) * config_.rope.inv_freq.size() * sizeof(float2), "RoPE");
  iota_ = DeviceBuffer(static_cast<std::size_t>(rows) * sizeof(std::int32_t), "a prompt");
  zeros_ = DeviceBuffer(static_cast<std::size_t>(rows) * sizeof(std::int32_t), "a prompt");
  check(cuda::fill_iota(iota_.as<std::int32_t>(), rows, stream), "a prompt");
  check(cudaMemsetAsync(zeros_.data(), 0, zeros_.bytes(), stream), "a prompt");
  attention_ = std::make_unique<ObservedAttention>(
      kernels_, layer_cache(0, static_cast<int>(options_.caches.size())),
      static_cast<int>(config_.layers), stream);
  admitted_ = DeviceBuffer(4 * sizeof(std::uint32_t), "an admission");
  admission_ = std::make_unique<AdmissionMemory>(model, admission_need(options_), stream);
}

void EvictingCache::fill_rules() {
  std::vector<kernels::PairRule> rules;
  for (std::uint32_t layer = 0; layer < config_.layers; ++layer)
    for (std::size_t pair = 0; pair < slots_.pairs(); ++pair) {
      const Guards guards = slots_.guards(layer, pair);
      rules.push_back(
          {.budget = slots_.budget(layer, pair), .sinks = guards.sinks, .recent = guards.recent});
    }
  rules_ = cuda::upload(rules, "budgets");
  std::vector<std::byte> params(options_.caches.size() * kernels_.params_bytes);
  std::vector<std::uint32_t> thresholds, ids;
  std::vector<std::uint64_t> seeds;
  for (std::size_t s = 0; s < options_.caches.size(); ++s) {
    const CacheOptions& cache = options_.caches[s];
    kernels_.params(cache.policy.params, params.data() + s * kernels_.params_bytes);
    thresholds.push_back(cache.threshold16);
    seeds.push_back(cache.seed);
    ids.push_back(cache.sequence);
  }
  params_ = cuda::upload(params, "the policy's parameters");
  thresholds_ = cuda::upload(thresholds, "request thresholds");
  seeds_ = cuda::upload(seeds, "seeds");
  sequence_ids_ = cuda::upload(ids, "sequences");
}

std::uint64_t EvictingCache::bytes(const DeviceModel& model, const Options& options) {
  const PairSlots slots(model.config(), checked(options.caches), options.most_tokens);
  return 2 * key_bytes(model, slots.total()) +
         static_cast<std::uint64_t>(slots.total()) *
             (entry_of(options)->slot_bytes +
              sizeof(std::uint32_t) * (options.turns_by_age() ? 2 : 1));
}

std::uint64_t EvictingCache::work_bytes(const DeviceModel& model, const Options& options) {
  const PairSlots slots(model.config(), checked(options.caches), options.most_tokens);
  const PolicyInfo& info = options.policy();
  const auto cache = model.slot_cache(static_cast<int>(options.caches.size()), slots.most());
  const std::uint64_t seen = options.watched && info.needs != Needs::nothing
                                 ? static_cast<std::uint64_t>(slots.total()) * sizeof(Observation)
                                 : 0;
  const std::uint32_t admitted = options.longest_admission;
  const std::uint64_t admission =
      admitted == 0
          ? 0
          : AdmissionMemory::bytes(model, admission_need(options),
                                   std::max(admitted, static_cast<std::uint32_t>(slots.most())));
  return seen + q_bytes(model, options) + attention_bytes(model, options, cache) + admission;
}

BatchState::Row EvictingCache::row(std::uint32_t fed) const {
  const bool idle = fed == 0;
  return {.position = idle ? -1 : static_cast<std::int32_t>(fed),
          .slot = 0,
          .length = static_cast<std::int32_t>(idle ? 0 : fed + 1)};
}

void EvictingCache::refuse_beyond(std::uint32_t fed, std::uint64_t more) const {
  const std::uint32_t most = options_.most_tokens > 0 ? options_.most_tokens : kLongestSequence - 1;
  if (fed + more > most)
    throw std::invalid_argument(
        fmt::format("CUDA decoder: {} tokens of a sequence; it was made for {}", fed + more, most));
}

std::uint32_t EvictingCache::admission_tokens(int sequence) const {
  return options_.caches.at(static_cast<std::size_t>(sequence)).prefill.chunk;
}

kernels::SlotCache EvictingCache::layer_cache(std::uint32_t layer, int sequences) const {
  kernels::SlotCache cache = model_.slot_cache(sequences, slots_.most());
  const std::size_t at = pair_index(layer, 0);
  cache.first_slot = first_slots_.as<std::int64_t>() + at;
  cache.keys = keys_.data();
  cache.values = values_.data();
  cache.positions = positions_.as<std::uint32_t>();
  cache.lengths = lengths_.as<std::int32_t>() + at;
  cache.next_slots = next_slots_.as<std::int32_t>() + at;
  cache.ages = ages_.as<std::uint32_t>();
  return cache;
}

kernels::PolicyState EvictingCache::layer_policy(std::uint32_t layer) const {
  return {.states = states_.data(),
          .rules = rules_.as<kernels::PairRule>() + pair_index(layer, 0),
          .params = params_.data(),
          .threshold16 = thresholds_.as<std::uint32_t>(),
          .seeds = seeds_.as<std::uint64_t>(),
          .sequence_ids = sequence_ids_.as<std::uint32_t>(),
          .layer = layer,
          .seen = seen_.as<Observation>()};
}

kernels::SlotCache EvictingCache::of_sequence(kernels::SlotCache cache, int sequence) const {
  const auto pair = static_cast<std::ptrdiff_t>(sequence) * config_.kv_heads;
  cache.sequences = 1;
  cache.first_slot += pair;
  cache.lengths += pair;
  cache.next_slots += pair;
  return cache;
}

kernels::PolicyState EvictingCache::of_sequence(kernels::PolicyState policy, int sequence) const {
  policy.rules += static_cast<std::ptrdiff_t>(sequence) * config_.kv_heads;
  policy.params += static_cast<std::size_t>(sequence) * kernels_.params_bytes;
  policy.threshold16 += sequence;
  policy.seeds += sequence;
  policy.sequence_ids += sequence;
  return policy;
}

// --- An admission --------------------------------------------------------------------------------

void EvictingCache::begin_admission(int sequence, std::uint32_t fed, std::uint32_t tokens) {
  current_ = {sequence, fed, tokens};
  std::uint32_t older = 0;
  const std::size_t first = static_cast<std::size_t>(sequence) * config_.kv_heads;
  for (std::uint32_t layer = 0; layer < config_.layers; ++layer)
    for (std::size_t head = 0; head < config_.kv_heads; ++head)
      older = std::max(older, slots_.older(layer, first + head, fed));
  // A shrink looks at every slot of the cache that it takes the older ones from.
  admission_->reserve(std::max(older + tokens, static_cast<std::uint32_t>(slots_.most())));
  // Nothing, at the position of the first new token; then the new tokens.
  const std::uint32_t words[]{fed, 0, fed, tokens};
  check(cudaMemcpyAsync(admitted_.data(), words, sizeof words, cudaMemcpyHostToDevice, stream_),
        "an admission");

  const CacheOptions& cache = options_.caches[static_cast<std::size_t>(sequence)];
  if (!policy().weighted) return;
  const auto states = cache.policy.entry->make_states(cache.policy.params);
  std::vector<float> weights;
  for (std::uint32_t age = 0; age < tokens; ++age)
    weights.push_back(age < states->tail() ? states->weight(age) : 0.0f);
  check(cudaStreamSynchronize(stream_), "an admission");
  weights_ = cuda::upload(weights, "weights of queries");
}

/// Tokens that stay in `from` go to `to`: words [0, 2) of admitted_ without new ones, or [2, 4)
/// with them.
void EvictingCache::shrink(const kernels::SlotCache& from, std::byte* from_states,
                           Observation* seen, const kernels::SlotCache& to, std::byte* to_states,
                           std::uint32_t layer) {
  const bool with_new = from.keys != keys_.data();
  const auto* const words = admitted_.as<std::uint32_t>() + (with_new ? 2 : 0);
  kernels::PolicyState policy = of_sequence(layer_policy(layer), current_.sequence);
  policy.states = from_states;
  check(admission_kernels_.shrink({.from = from,
                                   .to = to,
                                   .policy = policy,
                                   .to_states = to_states,
                                   .now = words,
                                   .admitted = words + 1,
                                   .seen = seen,
                                   .workspace = admission_->shrink_workspace()},
                                  stream_),
        "a shrink");
}

void EvictingCache::begin_layer(std::uint32_t layer) {
  admission_->clear_seen();
  if (current_.fed == 0) {
    admission_->clear_older();
    return;
  }
  // The live tokens come along; a victim that was chosen already is chosen again.
  const auto own = static_cast<int>(options_.caches.size());
  shrink(of_sequence(layer_cache(layer, own), current_.sequence), states_.data(), nullptr,
         admission_->cache(), admission_->states(), layer);
  if (options_.squeezed()) squeeze_keys(squeeze_shape(0, 0), true);
}

void EvictingCache::squeeze_keys(const kernels::SqueezeArgs& shape, bool of_older) {
  const kernels::SlotCache cache = admission_->cache();
  check(kernels::squeeze_keys({.shape = shape,
                               .slots = cache.most_slots,
                               .positions = cache.positions,
                               .rotated = options_.two_frames(),
                               .now = current_.fed,
                               .keys = cache.keys,
                               .to = admission_->turned_keys()},
                              of_older, stream_),
        "positions of a prompt");
}

const void* EvictingCache::attended_keys() const {
  const bool as_written = options_.two_frames() && current_.fed == 0;  // nothing has left
  return as_written ? admission_->cache().keys : admission_->turned_keys();
}

kernels::SqueezeArgs EvictingCache::squeeze_shape(int first, int tokens) const {
  return {.type = model_.type(),
          .query_heads = static_cast<int>(config_.query_heads),
          .kv_heads = static_cast<int>(config_.kv_heads),
          .head_size = static_cast<int>(config_.head_size),
          .rotated = static_cast<int>(config_.rope.rotated()),
          .inv_freq = inv_freq_.as<float>(),
          .rope_factor = options_.two_frames() ? 1 : config_.rope.factor,
          .older = admission_->older(),
          .first = first,
          .tokens = tokens};
}

kernels::RopeWriteArgs EvictingCache::prompt_write(std::uint32_t layer, const PromptPart& part) {
  const kernels::SlotCache cache = admission_->cache();
  kernels::RopeWriteArgs args{};
  args.sequences = zeros_.as<std::int32_t>();
  args.slots = iota_.as<std::int32_t>();
  // The part's slots begin behind those of the parts before it.
  const std::size_t ahead = std::size_t{part.first} * config_.head_size * bytes_of(model_.dtype());
  args.keys = static_cast<std::byte*>(cache.keys) + ahead;
  args.values = static_cast<std::byte*>(cache.values) + ahead;
  args.next = {.first_slot = cache.first_slot,
               .next_slots = cache.lengths,
               .positions = nullptr,
               .now = nullptr};
  args.q = q_.data();
  if (options_.turns_by_age()) return args;
  const auto half = static_cast<int>(config_.rope.inv_freq.size());
  if (layer == 0 || part.first != 0 || part.rows != static_cast<int>(current_.tokens))
    check(cuda::fill_rope_rows(inv_freq_.as<float>(), half, nullptr, part.position, part.rows,
                               config_.rope.factor, turns_.as<float2>(), stream_),
          "RoPE");
  args.rotated = 2 * half;
  args.rope = turns_.as<float2>();
  args.positions = iota_.as<std::int32_t>();
  return args;
}

void EvictingCache::attend_prompt(std::uint32_t layer, const PromptPart& part,
                                  const LayerOutputs& to) {
  const kernels::SlotCache cache = admission_->cache();
  if (options_.squeezed() && attended_keys() != cache.keys) {
    const kernels::SqueezeArgs shape = squeeze_shape(static_cast<int>(part.first), part.rows);
    if (options_.turns_by_age())
      check(kernels::squeeze_queries(shape, q_.data(), q_.data(), stream_),
            "positions of a prompt");
    squeeze_keys(shape, false);
  }
  const bool observes = policy().needs != Needs::nothing;
  check(kernels::prefill_attention({.shape = admission_->shape(),
                                    .first = static_cast<int>(part.first),
                                    .queries = part.rows,
                                    .q = q_.data(),
                                    .keys = attended_keys(),
                                    .values = cache.values,
                                    .out = to.out,
                                    .lse = to.lse,
                                    .rows = observes ? admission_->rows() : nullptr,
                                    .older = admission_->older()},
                                   stream_),
        "prefill attention");
  if (!observes) return;
  const CacheOptions& options = options_.caches[static_cast<std::size_t>(part.sequence)];
  const std::uint32_t end = part.first + static_cast<std::uint32_t>(part.rows);
  std::uint32_t older = 0, tail = kNoTail;
  for (std::size_t head = 0; head < config_.kv_heads; ++head)
    older = std::max(
        older,
        slots_.older(layer, static_cast<std::size_t>(part.sequence) * config_.kv_heads + head,
                     current_.fed));
  if (policy().weighted) tail = options.policy.entry->make_states(options.policy.params)->tail();
  check(kernels::observe_queries({.shape = admission_->shape(),
                                  .needs = policy().needs,
                                  .first = static_cast<int>(part.first),
                                  .queries = part.rows,
                                  .keys_end = static_cast<int>(older + end),
                                  .younger = static_cast<int>(current_.tokens - end),
                                  .position = part.position,
                                  .q = q_.data(),
                                  .keys = attended_keys(),
                                  .rows = admission_->rows(),
                                  .older = admission_->older(),
                                  .weights = policy().weighted ? weights_.as<float>() : nullptr,
                                  .tail = tail,
                                  .threshold16 = thresholds_.as<std::uint32_t>() + part.sequence,
                                  .seen = admission_->seen(),
                                  .workspace = admission_->observe_workspace()},
                                 stream_),
        "what a prompt's queries give");
}

void EvictingCache::end_layer(std::uint32_t layer) {
  const auto own = static_cast<int>(options_.caches.size());
  shrink(admission_->cache(), admission_->states(),
         policy().needs == Needs::nothing ? nullptr : admission_->seen(),
         of_sequence(layer_cache(layer, own), current_.sequence), states_.data(), layer);
  if (options_.turns_by_age())
    check(kernels::number_by_age(of_sequence(layer_cache(layer, own), current_.sequence), stream_),
          "numbering by age");
}

// --- A step --------------------------------------------------------------------------------------

void EvictingCache::begin_step(int rows) {
  if (options_.turns_by_age()) return;
  check(cuda::fill_rope_rows(inv_freq_.as<float>(), static_cast<int>(config_.rope.inv_freq.size()),
                             batch_.state().positions, 0, rows, config_.rope.factor,
                             turns_.as<float2>(), stream_),
        "RoPE");
}

kernels::RopeWriteArgs EvictingCache::step_write(std::uint32_t layer, int rows) {
  const kernels::SlotCache cache = layer_cache(layer, rows);
  kernels::RopeWriteArgs args{};
  args.keys = cache.keys;
  args.values = cache.values;
  args.sequences = batch_.rows();
  args.next = {.first_slot = cache.first_slot,
               .next_slots = cache.next_slots,
               .positions = cache.positions,
               .now = reinterpret_cast<const std::uint32_t*>(batch_.state().positions)};
  args.q = q_.data();
  if (options_.turns_by_age()) return args;
  args.rotated = static_cast<int>(config_.rope.rotated());
  args.rope = turns_.as<float2>();
  args.positions = batch_.rows();
  return args;
}

void EvictingCache::attend_step(std::uint32_t layer, int rows, const LayerOutputs& to) {
  attention_->attend({.cache = layer_cache(layer, rows),
                      .policy = layer_policy(layer),
                      .numbering = options_.squeezed() ? Positions::cache : Positions::original,
                      .two_frames = options_.two_frames(),
                      .now = reinterpret_cast<const std::uint32_t*>(batch_.state().positions),
                      .q = q_.data(),
                      .inv_freq = inv_freq_.as<float>(),
                      .rotated = static_cast<int>(config_.rope.rotated()),
                      .rope_factor = config_.rope.factor,
                      .out = to.out,
                      .lse = to.lse,
                      .workspace = nullptr,
                      .settled = true});
}

void EvictingCache::observe_step() { attention_->observe(); }

void EvictingCache::end_step() { attention_->join(); }

std::uint64_t EvictingCache::live_bytes(int sequence, std::uint32_t fed) const {
  std::uint64_t live = 0;
  const std::size_t first = static_cast<std::size_t>(sequence) * config_.kv_heads;
  for (std::uint32_t layer = 0; layer < config_.layers; ++layer)
    for (std::size_t head = 0; head < config_.kv_heads; ++head)
      live += fed == 0 ? 0 : slots_.older(layer, first + head, fed - 1) + 1;
  return live * 2 * config_.head_size * bytes_of(model_.dtype());
}

std::uint64_t EvictingCache::evictions(int sequence, std::uint32_t behind) const {
  std::uint64_t left = 0;
  const std::size_t first = static_cast<std::size_t>(sequence) * config_.kv_heads;
  for (std::uint32_t layer = 0; layer < config_.layers; ++layer)
    for (std::size_t head = 0; head < config_.kv_heads; ++head)
      left += behind - slots_.older(layer, first + head, behind);
  return left;
}

void EvictingCache::pretend(int sequence, std::uint32_t tokens) {
  const std::size_t first_pair = static_cast<std::size_t>(sequence) * config_.kv_heads;
  const std::size_t dim = config_.head_size, element = bytes_of(model_.dtype());
  for (std::uint32_t layer = 0; layer < config_.layers; ++layer)
    for (std::size_t head = 0; head < config_.kv_heads; ++head) {
      const std::size_t at = pair_index(layer, first_pair + head);
      const auto first = static_cast<std::size_t>(slots_.first_slots()[at]);
      const std::uint32_t live = slots_.older(layer, first_pair + head, tokens);
      for (const DeviceBuffer* cache : {&keys_, &values_})
        check(cuda::fill_normal(model_.type(), cache->data() + first * dim * element, live * dim,
                                1.0f, first * 2 + (cache == &keys_), stream_),
              "drawing a cache");
      // The sinks and the youngest; with states of nothing seen.
      const std::uint32_t sinks = slots_.guards(layer, first_pair + head).sinks;
      std::vector<std::uint32_t> positions(live);
      for (std::uint32_t i = 0; i < live; ++i) positions[i] = i < sinks ? i : tokens - live + i;
      check(cudaMemcpyAsync(positions_.as<std::uint32_t>() + first, positions.data(),
                            positions.size() * sizeof(std::uint32_t), cudaMemcpyHostToDevice,
                            stream_),
            "drawing a cache");
      if (kernels_.slot_bytes > 0)
        check(cudaMemsetAsync(states_.data() + first * kernels_.slot_bytes, 0,
                              live * kernels_.slot_bytes, stream_),
              "drawing a cache");
      for (const DeviceBuffer* words : {&lengths_, &next_slots_})
        check(cudaMemcpyAsync(words->as<std::uint32_t>() + at, &live, sizeof live,
                              cudaMemcpyHostToDevice, stream_),
              "drawing a cache");
    }
  if (options_.turns_by_age())
    for (std::uint32_t layer = 0; layer < config_.layers; ++layer)
      check(kernels::number_by_age(
                of_sequence(layer_cache(layer, static_cast<int>(options_.caches.size())), sequence),
                stream_),
            "drawing a cache");
  check(cudaStreamSynchronize(stream_), "drawing a cache");
}

}  // namespace kvlab
