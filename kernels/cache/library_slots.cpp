// kvlab_slots, the C interface of SlotCaches. It also counts the tokens that each layer was fed.
#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <stdexcept>

#include "kernels/cache/slot_caches.hpp"
#include "kernels/decode/pair_attention.hpp"
#include "kernels/host/transfer.hpp"
#include "kernels/library_policy.hpp"
#include "kernels/why_not.hpp"

using namespace kvlab;
using namespace kvlab::kernels;

namespace {

/// Max tokens of a sequence, because RoPE tables are looked up by signed positions.
constexpr std::uint32_t kMaxTokens = 0x7fff'ffff;

/// Throws std::invalid_argument with this message if `holds` is false.
template <class... Parts>
void want(bool holds, fmt::format_string<const Parts&...> said, const Parts&... parts) {
  if (!holds) throw std::invalid_argument(fmt::format(said, parts...));
}

/// Runs a call. Returns what it throws as an error that kvlab_last_error() explains.
template <class Call>
cudaError_t record_call(const char* name, Call call) try {
  call();
  return record_error(name, cudaSuccess);
} catch (const std::invalid_argument& error) {
  return record_error(name, cudaErrorInvalidValue, error.what());
} catch (const cuda::Error& error) {
  return record_error(name, error.code, error.what());
} catch (const std::exception& error) {
  return record_error(name, cudaErrorUnknown, error.what());
}

template <class Args>
void want_args(const Args* args) {
  want(args != nullptr, "an argument is NULL");
  if (const std::string why = why_not_size(*args); !why.empty()) throw std::invalid_argument(why);
}

void want_config(const kvlab_slots_config& c) {
  const kvlab_cache shape{.type = c.type,
                          .sequences = c.sequences,
                          .query_heads = c.query_heads,
                          .kv_heads = c.kv_heads,
                          .head_size = c.head_size,
                          .softmax_scale = 1,
                          .max_slots = 1};
  if (const std::string why = why_not_shape(shape, "config", kMaxGroup); !why.empty())
    throw std::invalid_argument(why);
  want(c.policy && c.layers && c.rules && c.ropes, "policy, layers, ropes or rules is NULL");
  want(c.layer_count > 0 && c.rope_count > 0, "layer_count is {}, rope_count {}: at least 1",
       c.layer_count, c.rope_count);
  for (int layer = 0; layer < c.layer_count; ++layer)
    want(c.layers[layer].rope >= 0 && c.layers[layer].rope < c.rope_count,
         "layers[{}].rope is {} of {}", layer, c.layers[layer].rope, c.rope_count);
  for (int rope = 0; rope < c.rope_count; ++rope)
    want(c.ropes[rope].rotated > 0 && c.ropes[rope].rotated <= c.head_size &&
             c.ropes[rope].rotated % 2 == 0 && c.ropes[rope].inv_freq,
         "ropes[{}].rotated is {}: an even number of at most head_size, {}, with frequencies", rope,
         c.ropes[rope].rotated, c.head_size);
  want(c.tier_count >= 0 && c.tier_count <= kMaxDeviceTiers && (c.tier_count == 0 || c.tiers),
       "tier_count is {}: at most {}, with tiers", c.tier_count, kMaxDeviceTiers);
  const auto features = c.policy->kernels.features.size();
  want(static_cast<std::size_t>(c.feature_count) == features && (features == 0 || c.features),
       "feature_count is {}: the policy reads {}", c.feature_count, features);
  for (int at = 0; at < c.feature_count; ++at) {
    want(c.features[at] >= KVLAB_KEY_NORM && c.features[at] <= KVLAB_VALUE_OUT_NORM1,
         "features[{}] is {}: no kvlab_column", at, static_cast<int>(c.features[at]));
    for (int layer = 0; layer < c.layer_count && c.features[at] == KVLAB_VALUE_OUT_NORM1; ++layer)
      want(c.layers[layer].output && c.hidden > 0,
           "layers[{}].output is NULL, or hidden, {}, not above 0: value_out_norm1 reads them",
           layer, c.hidden);
  }
  want(c.params || c.policy->kernels.params_bytes == 0, "params is NULL");
  want(c.every <= 0x7fff'ffff && (c.numbering == KVLAB_ORIGINAL || c.numbering == KVLAB_SQUEEZED),
       "every is {}, numbering {}: KVLAB_ORIGINAL or KVLAB_SQUEEZED", c.every,
       static_cast<int>(c.numbering));
  want(std::max({c.part, c.longest, c.tokens}) <= kMaxTokens,
       "tokens is {}, part {}, longest {}: at most {}", c.tokens, c.part, c.longest, kMaxTokens);
}

SlotPair pair_of(const kvlab_slots_config& c, std::size_t at) {
  const kvlab_rule& rule = c.rules[at];
  const bool stays = rule.budget == kUnlimited;
  want(stays || (rule.budget > rule.sinks && rule.budget - rule.sinks >= rule.recent &&
                 rule.budget <= 0x7fff'ffff),
       "rules[{}]: budget is {}; at least sinks, {}, and recent, {}, and more than sinks", at,
       rule.budget, rule.sinks, rule.recent);
  want(rule.group_max == c.rules[0].group_max,
       "rules[{}].group_max is {}, that of rules[0] {}; the same in all is expected", at,
       rule.group_max, c.rules[0].group_max);
  SlotPair pair{.budget = rule.budget, .protected_tokens = {rule.sinks, rule.recent}};
  std::uint64_t slots = 0;
  for (int r = 0; r < c.tier_count; ++r) {
    const kvlab_rung& tier =
        c.tiers[at * static_cast<std::size_t>(c.tier_count) + static_cast<std::size_t>(r)];
    const int least =
        pair.tiers.empty() ? 0 : static_cast<int>(pair.tiers.back().format - kKvFormats);
    want(static_cast<int>(tier.format) >= least && tier.format <= KVLAB_FORM_2,
         "tiers of pair {}: format {} under format {}; a kvlab_form no more exact is expected", at,
         static_cast<int>(tier.format), least);
    pair.tiers.push_back({&kKvFormats[tier.format], tier.slots});
    slots += tier.slots;
  }
  if (stays && !pair.tiers.empty()) pair.tiers = {{pair.tiers.front().format, kMaxTokens}};
  want(stays || c.tier_count == 0 || (slots == rule.budget && pair.tiers.front().slots > 0),
       "tiers of pair {}: {} slots of a budget of {}, and one at least on the first", at, slots,
       rule.budget);
  return pair;
}

/// Converts and checks the C struct. The result still refers to its policy and output weights.
SlotsConfig config_of(const kvlab_slots_config& c) {
  want_config(c);
  const kvlab_policy& policy = *c.policy;
  SlotsConfig config{.type = c.type,
                     .query_heads = c.query_heads,
                     .kv_heads = c.kv_heads,
                     .head_size = c.head_size,
                     .max_tokens = c.tokens,
                     .kernels = policy.kernels};
  for (int layer = 0; layer < c.layer_count; ++layer)
    config.layers.push_back({.number = c.layers[layer].number,
                             .softmax_scale = c.layers[layer].softmax_scale,
                             .table = static_cast<std::uint32_t>(c.layers[layer].rope),
                             .output = c.layers[layer].output});
  for (int rope = 0; rope < c.rope_count; ++rope)
    config.ropes.push_back(
        {{c.ropes[rope].inv_freq, c.ropes[rope].inv_freq + c.ropes[rope].rotated / 2},
         c.ropes[rope].factor});
  Modifiers modifiers{.every = std::max(c.every, 1u), .once = c.once != 0, .smooth = c.smooth};
  if (c.pool_max != 0) modifiers.pool = Modifiers::Pool::max;
  if (c.by_layer != 0) modifiers.scope = Modifiers::Scope::layer;
  if (c.rules[0].group_max != 0) modifiers.group = Modifiers::Group::max;
  const auto* const params = static_cast<const std::byte*>(c.params);
  for (int s = 0; s < c.sequences; ++s)
    config.sequences.push_back(
        {.modifiers = modifiers,
         .params = {params, params + (params ? policy.kernels.params_bytes : 0)},
         .threshold16 = c.threshold16,
         .seed = c.seeds ? c.seeds[s] : 0,
         .id = static_cast<std::uint32_t>(s)});
  const std::size_t pairs = static_cast<std::size_t>(c.layer_count) *
                            static_cast<std::size_t>(c.sequences) *
                            static_cast<std::size_t>(c.kv_heads);
  for (std::size_t at = 0; at < pairs; ++at) config.pairs.push_back(pair_of(c, at));
  want(c.numbering == KVLAB_ORIGINAL || !config.is_quantized(),
       "quantized tiers under KVLAB_SQUEEZED; they need keys at original positions");
  if (c.numbering == KVLAB_SQUEEZED)
    config.numbering = policy.kernels.oldest_first ? KVLAB_TWO_FRAMES : KVLAB_SQUEEZED;
  config.features = {.count = c.feature_count, .hidden = c.hidden};
  std::copy_n(c.features, c.feature_count, config.features.features);
  if (c.part > 0) config.part = c.part;
  want(config.is_fast() || !policy.header,
       "quantized tiers of float32, or of more than {} query heads for a KV head, and RoPE "
       "of half a head under KVLAB_SQUEEZED: a policy of the registry is expected",
       kMaxTierGroup);
  config.kernels = kernels_for(config, policy.kernels,
                               policy.header ? PlainKernels::absent : PlainKernels::present);
  config.weigh = [&policy](std::span<const std::byte> of, std::span<float> to) {
    std::uint32_t tail = kNoTail;
    const auto queries = static_cast<std::uint32_t>(to.size());
    cuda::check(kvlab_policy_weights(&policy, of.data(), queries, to.data(), &tail),
                "weights of queries");
    return tail;
  };
  return config;
}

}  // namespace

struct kvlab_slots {
  kvlab_slots(SlotsConfig config, cudaStream_t stream)
      : caches(std::move(config), stream),
        sequences(caches.config().sequences.size()),
        layers(caches.config().layers.size()),
        now("positions", sequences),
        fed(layers * sequences),
        behind(sequences) {
    sit_out(0, sequences);
  }

  struct Now {
    Now(cuda::Arena& arena, std::size_t sequences) : of(arena.take<std::uint32_t>(sequences)) {}
    Now() = default;
    std::uint32_t* of = nullptr;  // [sequence]
  };
  /// The append in progress.
  struct Going {
    int sequence = -1;
    std::uint32_t fed = 0, tokens = 0;
    bool ends_prompt = false;
    bool operator==(const Going&) const = default;
  };

  /// Marks sequences as idle, so that a step without before_step() does nothing. Enqueued on the
  /// stream.
  void sit_out(std::size_t sequence, std::size_t count) const {
    static_assert(kIdle == ~std::uint32_t{0});
    cuda::check(cudaMemsetAsync(now->of + sequence, 0xff, count * sizeof *now->of, caches.stream()),
                "positions");
  }
  std::uint32_t& fed_of(std::size_t layer, std::size_t sequence) {
    return fed[layer * sequences + sequence];
  }
  void want_sequence(int sequence) const {
    want(sequence >= 0 && static_cast<std::size_t>(sequence) < sequences, "sequence is {} of {}",
         sequence, sequences);
  }
  void want_layer(int layer) const {
    want(layer >= 0 && static_cast<std::size_t>(layer) < layers, "layer is {} of {}", layer,
         layers);
  }
  void check_capacity(std::uint64_t tokens) const {
    const std::uint32_t most = std::min(caches.slots().max_tokens(), kMaxTokens);
    want(tokens <= most, "more than {} tokens, and caches that keep so many", most);
  }
  void append(const kvlab_slots_part& part);
  void append_alone(const kvlab_slots_part& part);
  void attend(std::uint32_t layer, const StepRows& rows, const void* qkv, void* out,
              float* lse) const;
  void rotations(std::uint32_t first, int rows);
  void write(RopeWriteArgs args, const void* qkv, int rows) const;
  AttendedRows attended_rows(const void* qkv, void* out, float* lse) const;
  void before_step(const unsigned char* decodes);
  void step(std::uint32_t layer, const void* qkv, void* out, float* lse) const;
  void clear();

  SlotCaches caches;
  std::size_t sequences, layers;
  cuda::Placed<Now> now;
  std::vector<std::uint32_t> fed;     // [layer, sequence]
  std::vector<std::uint32_t> behind;  // [sequence]: tokens fed before the last append
  Going going;
  int layer_going = -1;
  std::uint32_t next = 0;        ///< the first token of the append's next part
  std::uint32_t rope_first = 0;  ///< position of the first of the rope_rows rows that are filled
  int rope_rows = 0;
};

/// Completes a write's arguments with the projection's output, and launches the write.
void kvlab_slots::write(RopeWriteArgs args, const void* qkv, int rows) const {
  args.tokens = rows;
  args.qkv = qkv;
  cuda::check(rope_write(args, caches.stream()), "writing keys and values");
}

AttendedRows kvlab_slots::attended_rows(const void* qkv, void* out, float* lse) const {
  const SlotsConfig& config = caches.config();
  const auto queries = static_cast<std::size_t>(config.query_heads);
  const auto all = static_cast<std::size_t>(config.query_heads + 2 * config.kv_heads);
  return {out, lse, static_cast<const std::byte*>(qkv) + queries * config.key_bytes(),
          all * static_cast<std::size_t>(config.head_size)};
}

void kvlab_slots::rotations(std::uint32_t first, int rows) {
  if (first == rope_first && rows <= rope_rows) return;
  caches.fill_ropes(nullptr, first, rows);
  rope_first = first, rope_rows = rows;
}

void kvlab_slots::append(const kvlab_slots_part& part) {
  want_sequence(part.sequence);
  want_layer(part.layer);
  want(part.qkv && part.out && aligned16(part.qkv) && aligned16(part.out),
       "qkv or out is NULL, or does not begin at a multiple of 16 bytes");
  const auto sequence = static_cast<std::size_t>(part.sequence),
             layer = static_cast<std::size_t>(part.layer);
  want(part.fed == fed_of(layer, sequence), "fed is {}: layer {} has had {} tokens", part.fed,
       layer, fed_of(layer, sequence));
  want(part.count > 0 && part.count <= part.tokens && part.first <= part.tokens - part.count,
       "{} tokens from {} on, of an append of {}", part.count, part.first, part.tokens);
  check_capacity(std::uint64_t{part.fed} + part.tokens);
  if (part.tokens == 1 && caches.is_quantized()) return append_alone(part);
  const Going requested{part.sequence, part.fed, part.tokens, part.ends_prompt != 0};
  if (part.first == 0) {
    if (requested != going) {
      going = {};     // stays empty if begin() fails for lack of memory
      rope_rows = 0;  // a step may have overwritten them since
      caches.begin(part.sequence, part.fed, part.tokens, requested.ends_prompt);
    }
    going = requested, layer_going = part.layer, next = 0;
  }
  want(requested == going && part.layer == layer_going && part.first == next,
       "first is {}: layer {} goes on with {}", part.first, layer_going, next);

  const SlotsConfig& config = caches.config();
  const std::size_t row =
      static_cast<std::size_t>(config.query_heads + 2 * config.kv_heads) * config.key_bytes();
  const auto queries = static_cast<std::size_t>(config.query_heads);
  for (std::uint32_t at = 0; at < part.count; at += config.part) {
    const AppendChunk some{part.first + at,
                           static_cast<int>(std::min(config.part, part.count - at))};
    const std::byte* const qkv = static_cast<const std::byte*>(part.qkv) + at * row;
    rotations(part.fed + some.first, some.rows);
    write(caches.write(static_cast<std::uint32_t>(layer), some), qkv, some.rows);
    caches.attend(
        static_cast<std::uint32_t>(layer), some,
        attended_rows(qkv, static_cast<std::byte*>(part.out) + at * queries * config.key_bytes(),
                      part.lse ? part.lse + at * queries : nullptr));
  }
  next += part.count;
  if (next < part.tokens) return;
  fed_of(layer, sequence) += part.tokens;
  behind[sequence] = part.fed;
  next = 0, layer_going = -1;
}

/// Appends a single token. It is quantized before it attends, as in a step.
void kvlab_slots::append_alone(const kvlab_slots_part& part) {
  const auto layer = static_cast<std::uint32_t>(part.layer);
  const LayerRange own{layer, layer + 1};
  going = {};
  rope_rows = 0;
  caches.reserve();  // as other appends do
  caches.before_token(part.sequence, part.fed, own);
  cuda::check(cudaMemcpyAsync(now->of + part.sequence, &part.fed, sizeof part.fed,
                              cudaMemcpyHostToDevice, caches.stream()),
              "positions");
  rotations(part.fed, 1);
  attend(layer, {1, now->of + part.sequence, part.sequence}, part.qkv, part.out, part.lse);
  sit_out(static_cast<std::size_t>(part.sequence), 1);
  if (part.ends_prompt) caches.end_prompt(part.sequence, part.fed + 1, own);
  fed_of(layer, static_cast<std::size_t>(part.sequence)) += 1;
  behind[static_cast<std::size_t>(part.sequence)] = part.fed;
}

void kvlab_slots::before_step(const unsigned char* decodes) {
  std::vector<std::uint32_t> at(sequences, kIdle);
  for (std::size_t s = 0; s < sequences; ++s) {
    if (decodes && decodes[s] == 0) continue;
    for (std::size_t layer = 0; layer < layers; ++layer)
      want(fed_of(layer, s) == fed_of(0, s),
           "layer {} has had {} tokens of sequence {}, the first {}", layer, fed_of(layer, s), s,
           fed_of(0, s));
    at[s] = fed_of(0, s);
    check_capacity(std::uint64_t{at[s]} + 1);
  }
  going = {};  // the step may use its memory
  caches.reserve_for_steps();
  for (std::size_t s = 0; s < sequences; ++s) {
    if (at[s] == kIdle) continue;
    caches.before_token(static_cast<int>(s), at[s]);
    behind[s] = at[s];
    for (std::size_t layer = 0; layer < layers; ++layer) ++fed_of(layer, s);
  }
  rope_rows = 0;
  cuda::check(cudaMemcpyAsync(now->of, at.data(), at.size() * sizeof at[0], cudaMemcpyHostToDevice,
                              caches.stream()),
              "positions");
}

void kvlab_slots::step(std::uint32_t layer, const void* qkv, void* out, float* lse) const {
  const StepRows rows{static_cast<int>(sequences), now->of};
  if (layer == 0) caches.fill_ropes(reinterpret_cast<const std::int32_t*>(now->of), 0, rows.count);
  attend(layer, rows, qkv, out, lse);
  if (layer + 1 == layers) sit_out(0, sequences);
}

void kvlab_slots::attend(std::uint32_t layer, const StepRows& rows, const void* qkv, void* out,
                         float* lse) const {
  write(caches.write(layer, rows), qkv, rows.count);
  caches.store_in_tiers(layer, rows);
  const AttendedRows to = attended_rows(qkv, out, lse);
  EvictingAttentionArgs args = caches.step(layer, rows, to);
  args.workspace = caches.workspace(0);
  args.settled = false;  // a step may follow another at once
  const EvictionKernels& kernels = caches.config().kernels;
  const bool brings = caches.config().features.count > 0;
  cuda::check(kernels.attend(kernels, args, caches.stream()), "evicting attention");
  if (brings) caches.bring(layer, rows, to);
  cuda::check(kernels.observe(kernels, {&args, 1}, !brings, caches.stream()),
              "observing attention");
}

void kvlab_slots::clear() {
  caches.clear();
  sit_out(0, sequences);
  std::ranges::fill(fed, 0u);
  std::ranges::fill(behind, 0u);
  going = {};
  next = 0, layer_going = -1;
}

extern "C" {

cudaError_t kvlab_slots_memory(const kvlab_slots_config* config, size_t* bytes) {
  return record_call(__func__, [&] {
    want_args(config);
    want(bytes != nullptr, "bytes is NULL");
    const SlotCaches::Bytes taken = SlotCaches::bytes(config_of(*config), config->longest);
    *bytes = taken.storage + taken.work +
             cuda::Placed<kvlab_slots::Now>::bytes(static_cast<std::size_t>(config->sequences));
  });
}

cudaError_t kvlab_slots_create(const kvlab_slots_config* config, cudaStream_t stream,
                               kvlab_slots** slots) {
  return record_call(__func__, [&] {
    want_args(config);
    want(slots != nullptr, "slots is NULL");
    auto made = std::make_unique<kvlab_slots>(config_of(*config), stream);
    if (config->longest > 0) made->caches.reserve(config->longest);
    *slots = made.release();
  });
}

void kvlab_slots_destroy(kvlab_slots* slots) { delete slots; }

cudaError_t kvlab_slots_clear(kvlab_slots* slots, cudaStream_t stream) {
  return record_call(__func__, [&] {
    want(slots != nullptr, "an argument is NULL");
    slots->caches.enqueue_on(stream);
    slots->clear();
  });
}

cudaError_t kvlab_slots_admit(kvlab_slots* slots, const kvlab_slots_part* part,
                              cudaStream_t stream) {
  return record_call(__func__, [&] {
    want(slots != nullptr, "an argument is NULL");
    want_args(part);
    slots->caches.enqueue_on(stream);
    slots->append(*part);
  });
}

cudaError_t kvlab_slots_before_step(kvlab_slots* slots, const unsigned char* decodes,
                                    cudaStream_t stream) {
  return record_call(__func__, [&] {
    want(slots != nullptr, "an argument is NULL");
    slots->caches.enqueue_on(stream);
    slots->before_step(decodes);
  });
}

cudaError_t kvlab_slots_step(kvlab_slots* slots, int layer, const void* qkv, void* out, float* lse,
                             cudaStream_t stream) {
  return record_call(__func__, [&] {
    want(slots && aligned16(qkv) && aligned16(out) && qkv && out,
         "slots, qkv or out is NULL, or does not begin at a multiple of 16 bytes");
    slots->want_layer(layer);
    slots->caches.enqueue_on(stream);
    slots->step(static_cast<std::uint32_t>(layer), qkv, out, lse);
  });
}

cudaError_t kvlab_slots_ask(const kvlab_slots* slots, int sequence, kvlab_slots_held* held) {
  return record_call(__func__, [&] {
    want(slots != nullptr, "an argument is NULL");
    want_args(held);
    slots->want_sequence(sequence);
    const auto s = static_cast<std::size_t>(sequence);
    held->tokens = slots->fed[s];
    held->evictions = slots->caches.evictions(sequence, slots->behind[s]);
    held->kv_bytes = slots->caches.held_bytes(sequence, held->tokens);
    held->allocated = slots->caches.allocated_bytes();
  });
}

cudaError_t kvlab_slots_kept(kvlab_slots* slots, int sequence, int layer, int kv_head,
                             uint32_t* positions, uint32_t most, uint32_t* count,
                             cudaStream_t stream) {
  return record_call(__func__, [&] {
    want(slots && positions && count, "an argument is NULL");
    slots->want_sequence(sequence);
    slots->want_layer(layer);
    want(kv_head >= 0 && kv_head < slots->caches.config().kv_heads, "kv_head is {} of {}", kv_head,
         slots->caches.config().kv_heads);
    slots->caches.enqueue_on(stream);
    const auto kept = slots->caches.kept_positions(sequence, static_cast<std::uint32_t>(layer),
                                                   static_cast<std::uint32_t>(kv_head));
    want(kept.size() <= most, "most is {}: {} are kept", most, kept.size());
    std::ranges::copy(kept, positions);
    *count = static_cast<std::uint32_t>(kept.size());
  });
}

}  // extern "C"
