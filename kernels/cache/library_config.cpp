#include "kernels/cache/library_config.hpp"

#include <algorithm>
#include <utility>

#include "kernels/cache/pair_slots.hpp"
#include "kernels/decode/pair_attention.hpp"
#include "kernels/host/check.hpp"
#include "kernels/library_policy.hpp"
#include "kernels/why_not.hpp"

namespace kvlab::kernels {
namespace {

void want_gather(const kvlab_kv_cache_config& c) {
  if (c.gather == nullptr)
    return want(c.devices == 0, "devices is {}, but gather is NULL; give both or neither",
                c.devices);
  want(c.devices >= 1 && std::int64_t{c.devices} * c.kv_heads <= 65535,
       "devices is {}, with {} KV heads each; give 1 or more devices, and at most 65535 heads",
       c.devices, c.kv_heads);
  want(c.by_layer != 0, "by_layer is 0, but gather is given, which is for by_layer only");
}

void want_config(const kvlab_kv_cache_config& c) {
  const kvlab_cache_view shape{.type = c.type,
                               .sequences = c.sequences,
                               .query_heads = c.query_heads,
                               .kv_heads = c.kv_heads,
                               .head_size = c.head_size,
                               .softmax_scale = 1,
                               .max_slots = 1,
                               .pages = c.pages};
  const int max_group = c.pages.blocks ? kMaxPagedGroup : kMaxGroup;
  if (const std::string why = why_not_shape(shape, "config", max_group); !why.empty())
    throw std::invalid_argument(why);
  want(c.policy && c.layers && c.rules && c.ropes, "policy, layers, ropes or rules is NULL");
  want(c.layer_count > 0 && c.rope_count > 0,
       "layer_count is {}, rope_count {}; each should be at least 1", c.layer_count, c.rope_count);
  for (int layer = 0; layer < c.layer_count; ++layer)
    want(c.layers[layer].rope >= 0 && c.layers[layer].rope < c.rope_count,
         "layers[{}].rope is {}; it should be below rope_count, {}", layer, c.layers[layer].rope,
         c.rope_count);
  for (int rope = 0; rope < c.rope_count; ++rope)
    want(c.ropes[rope].rotated > 0 && c.ropes[rope].rotated <= c.head_size &&
             c.ropes[rope].rotated % 2 == 0 && c.ropes[rope].inv_freq,
         "ropes[{}].rotated is {}; it should be even, above 0 and at most head_size, {}, and "
         "inv_freq should not be NULL",
         rope, c.ropes[rope].rotated, c.head_size);
  want(c.tier_count >= 0 && c.tier_count <= kMaxDeviceTiers && (c.tier_count == 0 || c.tiers),
       "tier_count is {}; it should be 0 to {}, and tiers should not be NULL unless it is 0",
       c.tier_count, kMaxDeviceTiers);
  const auto features = c.policy->kernels.features.size();
  want(static_cast<std::size_t>(c.feature_count) == features && (features == 0 || c.features),
       "feature_count is {}; it should be {}, as many as the policy reads, and features should not "
       "be NULL unless it is 0",
       c.feature_count, features);
  for (int at = 0; at < c.feature_count; ++at) {
    want(c.features[at] >= KVLAB_KEY_NORM && c.features[at] <= KVLAB_VALUE_OUT_NORM1,
         "features[{}] is {}, which is not a kvlab_feature", at, static_cast<int>(c.features[at]));
    for (int layer = 0; layer < c.layer_count && c.features[at] == KVLAB_VALUE_OUT_NORM1; ++layer)
      want(c.layers[layer].output && c.hidden > 0,
           "layers[{}].output is NULL or hidden is {}; value_out_norm1 needs W_o of every layer",
           layer, c.hidden);
  }
  want(c.params || c.policy->kernels.params_bytes == 0, "params is NULL");
  want(c.every <= 0x7fff'ffff &&
           (c.numbering == KVLAB_ORIGINAL_POSITIONS || c.numbering == KVLAB_CACHE_POSITIONS),
       "every is {}, numbering {}; every should be below 2^31, and numbering "
       "KVLAB_ORIGINAL_POSITIONS or KVLAB_CACHE_POSITIONS",
       c.every, static_cast<int>(c.numbering));
  // See refusal() in policies/executor.cpp.
  want(c.smooth == 0 || c.tier_count < 2 || c.every > 1 || c.once || c.by_layer,
       "smooth is {} and tier_count {}; on several tiers, smooth needs every above 1, once or "
       "by_layer",
       c.smooth, c.tier_count);
  want_gather(c);
  want(std::max({c.part, c.longest, c.tokens}) <= kMaxTokens,
       "tokens is {}, part {}, longest {}; each should be at most {}", c.tokens, c.part, c.longest,
       kMaxTokens);
}

/// Throws if blocks, drafts or gathered ranks are incompatible with the rest of the configuration.
void want_rows(const KvCacheConfig& config) {
  const bool has_blocks = config.pages.blocks != nullptr;
  want(
      !has_blocks || std::ranges::all_of(config.layers,
                                         [](const SlotLayer& layer) {
                                           return layer.keys && layer.values &&
                                                  aligned16(layer.keys) && aligned16(layer.values);
                                         }),
      "pages is given, but keys or values of a layer is NULL or does not begin at a multiple of 16 "
      "bytes");
  want(has_blocks ||
           std::ranges::none_of(config.layers,
                                [](const SlotLayer& layer) { return layer.keys || layer.values; }),
       "a layer has keys or values, but pages is zeroed; give both or neither");
  for (const auto& [given, name] : {std::pair{has_blocks, "pages"},
                                    {config.draft_tokens > 0, "draft_tokens"},
                                    {config.ranks.gather != nullptr, "gather"}})
    want(!given || !config.is_quantized(),
         "tiers are quantized, but {} is given; use tiers in 16 bit, or none", name);
  want(config.draft_tokens == 0 || config.numbering == KVLAB_ORIGINAL_POSITIONS,
       "draft_tokens is {}, but numbering is KVLAB_CACHE_POSITIONS; drafts need "
       "KVLAB_ORIGINAL_POSITIONS",
       config.draft_tokens);
  want(std::uint64_t{config.draft_tokens} * config.sequences.size() <= 1u << 20,
       "draft_tokens is {}, with {} sequences; together they should be at most 2^20 tokens",
       config.draft_tokens, config.sequences.size());
  if (!has_blocks) return;
  const int slots = PairSlots(config).max_slots();
  want(std::int64_t{config.pages.page} * config.pages.max_blocks >= slots,
       "pages.max_blocks is {}, of {} slots each; {} slots are needed (kvlab_kv_cache_slots)",
       config.pages.max_blocks, config.pages.page, slots);
}

void want_rule(const kvlab_rule& rule, std::size_t at, std::uint32_t group_max) {
  want(rule.budget == kUnlimited ||
           (rule.budget > rule.sinks && rule.budget - rule.sinks >= rule.recent &&
            rule.budget <= kMaxTokens),
       "rules[{}].budget is {}; it should be more than sinks, {}, and at least sinks + recent, "
       "with recent {}",
       at, rule.budget, rule.sinks, rule.recent);
  want(rule.group_max == group_max, "rules[{}].group_max is {}; it should be that of rules[0], {}",
       at, rule.group_max, group_max);
}

/// Throws unless the KV heads of a layer have equal rules. Under by_layer they keep the same
/// tokens. `heads`: number of KV heads of a layer.
void want_even(std::span<const kvlab_rule> rules, std::size_t heads) {
  for (std::size_t at = 0; at < rules.size(); ++at) {
    const kvlab_rule &first = rules[at / heads * heads], &own = rules[at];
    want(own.budget == first.budget && own.sinks == first.sinks && own.recent == first.recent,
         "by_layer is 1, but rules[{}] differs from rules[{}]; the KV heads of a layer should have "
         "equal rules",
         at, at / heads * heads);
  }
}

SlotPair pair_of(const kvlab_kv_cache_config& c, std::size_t at) {
  const kvlab_rule& rule = c.rules[at];
  want_rule(rule, at, c.rules[0].group_max);
  const bool stays = rule.budget == kUnlimited;
  // Steps would write to the slots of the next pair, because they never choose a victim.
  want(stays || c.policy->kernels.evicts,
       "rules[{}].budget is {}, but the policy never evicts; set the budget to UINT32_MAX, and "
       "tokens to the maximum length of a sequence",
       at, rule.budget);
  SlotPair pair{.budget = rule.budget, .protected_tokens = {rule.sinks, rule.recent}};
  std::uint64_t slots = 0;
  for (int r = 0; r < c.tier_count; ++r) {
    const kvlab_tier& tier =
        c.tiers[at * static_cast<std::size_t>(c.tier_count) + static_cast<std::size_t>(r)];
    const int min_format =
        pair.tiers.empty() ? 0 : static_cast<int>(*kernel_format(pair.tiers.back().format));
    want(static_cast<int>(tier.format) >= min_format && tier.format <= KVLAB_FORMAT_2,
         "tiers of pair {}: format {} follows format {}; formats should be in the order of "
         "kvlab_kv_format, from most to least exact",
         at, static_cast<int>(tier.format), min_format);
    pair.tiers.push_back({kKvFormats[tier.format], tier.slots});
    slots += tier.slots;
  }
  if (stays && !pair.tiers.empty()) pair.tiers = {{pair.tiers.front().format, kMaxTokens}};
  want(stays || c.tier_count == 0 || (slots == rule.budget && pair.tiers.front().slots > 0),
       "tiers of pair {}: the slots add up to {}; they should add up to the budget, {}, with at "
       "least one on the first tier",
       at, slots, rule.budget);
  return pair;
}

}  // namespace

KvCacheConfig config_of(const kvlab_kv_cache_config& c) {
  want_config(c);
  const kvlab_policy& policy = *c.policy;
  KvCacheConfig config{.type = c.type,
                       .query_heads = c.query_heads,
                       .kv_heads = c.kv_heads,
                       .head_size = c.head_size,
                       .max_tokens = c.tokens,
                       .kernels = policy.kernels,
                       .first_head = c.first_head,
                       .pages = c.pages,
                       .draft_tokens = c.draft_tokens,
                       .interleaves_appends = c.interleaves_appends != 0};
  for (int layer = 0; layer < c.layer_count; ++layer)
    config.layers.push_back({.number = c.layers[layer].number,
                             .softmax_scale = c.layers[layer].softmax_scale,
                             .table = static_cast<std::uint32_t>(c.layers[layer].rope),
                             .sinks = c.layers[layer].sinks,
                             .output = c.layers[layer].output,
                             .keys = c.layers[layer].keys,
                             .values = c.layers[layer].values});
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
  if (c.by_layer != 0) want_even({c.rules, pairs}, static_cast<std::size_t>(c.kv_heads));
  for (std::size_t at = 0; at < pairs; ++at) config.pairs.push_back(pair_of(c, at));
  want(c.numbering == KVLAB_ORIGINAL_POSITIONS || !config.is_quantized(),
       "quantized tiers under KVLAB_CACHE_POSITIONS; they need keys at original positions");
  if (c.numbering == KVLAB_CACHE_POSITIONS)
    config.numbering =
        policy.kernels.oldest_first ? KVLAB_CACHE_POSITIONS_ROTATED : KVLAB_CACHE_POSITIONS;
  config.features = {.count = c.feature_count, .hidden = c.hidden};
  std::copy_n(c.features, c.feature_count, config.features.features);
  if (c.part > 0) config.part = c.part;
  if (c.gather)
    config.ranks = {c.devices, [call = c.gather, context = c.gather_context](
                                   const std::uint64_t* own, std::uint64_t* all, std::size_t count,
                                   cudaStream_t stream) {
                      cuda::check(call(context, own, all, count, stream), "gathering ranks");
                    }};
  want_rows(config);
  want(config.is_fast() || !policy.header,
       "a policy from a header supports neither quantized tiers with float32 or with more than {} "
       "query heads per KV head, nor KVLAB_CACHE_POSITIONS with RoPE of a part of the head; use a "
       "policy of the registry",
       kMaxTierGroup);
  want(
      config.is_fast() || !config.pages.blocks,
      "KVLAB_CACHE_POSITIONS with RoPE of a part of the head does not support the caller's blocks; "
      "zero pages");
  const bool has_plain = !policy.header && !config.pages.blocks;
  config.kernels =
      kernels_for(config, policy.kernels, has_plain ? PlainKernels::present : PlainKernels::absent);
  config.weigh = [&policy](std::span<const std::byte> policy_params, std::span<float> to) {
    std::uint32_t tail = kNoTail;
    const auto queries = static_cast<std::uint32_t>(to.size());
    cuda::check(kvlab_policy_weights(&policy, policy_params.data(), queries, to.data(), &tail),
                "weights of queries");
    return tail;
  };
  return config;
}

SequenceSettings settings_of(const kvlab_sequence_settings& c, const KvCacheConfig& config) {
  SequenceSettings settings;
  const std::size_t pairs =
      config.layers.size() *
      static_cast<std::size_t>(config.kv_heads);  // KV heads of one sequence, all layers
  const auto group_max =
      static_cast<std::uint32_t>(config.sequences.front().modifiers.group == Modifiers::Group::max);
  if (c.rules && config.sequences.front().modifiers.scope == Modifiers::Scope::layer)
    want_even({c.rules, pairs}, static_cast<std::size_t>(config.kv_heads));
  for (std::size_t at = 0; c.rules && at < pairs; ++at) {
    want_rule(c.rules[at], at, group_max);
    settings.rules.push_back({c.rules[at].budget, {c.rules[at].sinks, c.rules[at].recent}});
  }
  if (const auto* const params = static_cast<const std::byte*>(c.params))
    settings.params.emplace(params, params + config.kernels.params_bytes);
  if (c.seed) settings.seed = *c.seed;
  if (c.sequence_id) settings.id = *c.sequence_id;
  if (c.threshold16) settings.threshold16 = *c.threshold16;
  return settings;
}

}  // namespace kvlab::kernels
