// A kvlab_kv_cache for tests, and the CPU's caches, which get the same queries, keys and values.
#pragma once

#include <cmath>
#include <deque>
#include <random>
#include <stdexcept>

#include "kernels/kvlab.h"
#include "sim/cache/growing_rope.hpp"
#include "sim/cache/layer_cache.hpp"
#include "tests/catch.hpp"
#include "tests/device.hpp"

namespace kvlab {

inline constexpr std::uint32_t kLayers = 2, kHeads = 2, kGroup = 2, kSize = 64, kTokens = 150;
inline constexpr std::size_t kQueries = kHeads * kGroup * kSize,
                             kRow = kQueries + 2 * kHeads * kSize;
inline constexpr std::size_t kMostRows = 300;  ///< rows of a call
inline constexpr float kScale = 0.125f;
inline const CacheShape kModel{kLayers, kHeads, kSize};

inline Rope rope() {
  Rope rope;
  for (std::uint32_t i = 0; i < kSize / 2; ++i)
    rope.inv_freq.push_back(std::pow(10000.0f, -2.0f * static_cast<float>(i) / kSize));
  return rope;
}

/// Throws if a call failed. (Catch's macros may be used by one thread only.)
inline void done(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(kvlab_last_error());
}

/// The KV heads of a cache under tensor parallelism; by default all.
struct OwnHeads {
  std::uint32_t first = 0, count = kHeads;
};

/// A resolved configuration as the structs and arrays that a caller in C would fill in.
struct Layout {
  explicit Layout(const ResolvedConfig& cache, int sequences = 1, kvlab_type type = KVLAB_F32,
                  OwnHeads own = {}) {
    const PolicySpec& policy = cache.policy;
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      layers.push_back({.number = layer, .softmax_scale = kScale});
      for (std::uint32_t pair = 0; pair < static_cast<std::uint32_t>(sequences) * own.count;
           ++pair) {
        const std::uint32_t budget = cache.budget_of(layer, own.first + pair % own.count);
        const ProtectedTokens protected_tokens =
            budget == kNoBudget ? ProtectedTokens{} : resolve_protected_tokens(policy, budget);
        rules.push_back({budget, protected_tokens.sinks, protected_tokens.recent,
                         policy.modifiers.group == Modifiers::Group::max});
        if (policy.tier_plan.is_plain()) continue;
        for (const TierSlots& tier : *cache.planned_tiers(layer, budget))
          tiers.push_back({static_cast<kvlab_kv_format>(*kernel_format(tier.format)), tier.slots});
      }
    }
    for (const std::string& feature : policy.features)
      features.push_back(static_cast<kvlab_feature>(built_in_feature(feature).value()));
    config = {.struct_size = sizeof config,
              .type = type,
              .query_heads = static_cast<int>(own.count * kGroup),
              .kv_heads = static_cast<int>(own.count),
              .head_size = kSize,
              .sequences = sequences,
              .layer_count = kLayers,
              .rope_count = 1,
              .tier_count = static_cast<int>(tiers.size() / rules.size()),
              .feature_count = static_cast<int>(features.size()),
              .layers = layers.data(),
              .ropes = &table,
              .policy = kvlab_find_policy(std::string(policy.entry->info.name).c_str()),
              .rules = rules.data(),
              .tiers = tiers.data(),
              .seeds = seeds.data(),
              .features = features.data(),
              .numbering = cache.positions == Positions::cache ? KVLAB_CACHE_POSITIONS
                                                               : KVLAB_ORIGINAL_POSITIONS,
              .threshold16 = cache.threshold16(),
              .tokens = kTokens,
              .part = 32,
              .every = policy.modifiers.every,
              .smooth = policy.modifiers.smooth,
              .once = policy.modifiers.once,
              .by_layer = policy.modifiers.scope == Modifiers::Scope::layer,
              .pool_max = policy.modifiers.pool == Modifiers::Pool::max,
              .first_head = own.first};
    params.resize(kvlab_policy_params_bytes(config.policy));
    done(kvlab_policy_params(config.policy, policy.params.data(),
                             static_cast<int>(policy.params.size()), params.data()));
    config.params = params.data();
    seeds.assign(static_cast<std::size_t>(sequences), cache.seed);
    config.seeds = seeds.data();
  }
  Layout(const Layout&) = delete;

  Rope angles = rope();
  kvlab_rope table{angles.inv_freq.data(), kSize, 1};
  std::vector<kvlab_layer> layers;
  std::vector<kvlab_rule> rules;
  std::vector<kvlab_tier> tiers;
  std::vector<kvlab_feature> features;
  std::vector<std::byte> params;
  std::vector<std::uint64_t> seeds;
  kvlab_kv_cache_config config{};
};

/// A kvlab_kv_cache with memory for the rows of its calls. Its functions take rows with all heads,
/// and use those of the heads that the cache has.
class Slots {
 public:
  explicit Slots(const Layout& layout)
      : sequences_(static_cast<std::size_t>(layout.config.sequences)),
        heads_{layout.config.first_head, static_cast<std::uint32_t>(layout.config.kv_heads)} {
    done(kvlab_kv_cache_create(&layout.config, stream_.get(), &slots_));
  }
  ~Slots() { kvlab_kv_cache_destroy(slots_); }
  Slots(const Slots&) = delete;

  /// Appends a prompt in a layer, as two chunks.
  std::vector<float> append(int sequence, std::uint32_t layer, std::uint32_t fed, bool ends,
                            std::span<const float> qkv) {
    qkv_.assign(own_rows(qkv));
    const auto tokens = static_cast<std::uint32_t>(qkv.size() / kRow);
    kvlab_append_chunk part{.struct_size = sizeof part,
                            .sequence = sequence,
                            .layer = static_cast<int>(layer),
                            .fed = fed,
                            .tokens = tokens,
                            .ends_prompt = ends};
    for (const std::uint32_t count : {tokens / 2, tokens - tokens / 2}) {
      if (count == 0) continue;
      part.count = count;
      part.qkv = qkv_.data() + part.first * row();
      part.out = out_.data() + part.first * queries();
      done(kvlab_kv_cache_append(slots_, &part, stream_.get()));
      part.first += count;
    }
    return outputs(tokens);
  }
  /// Appends, in a layer, the chunk of a prompt of `tokens` tokens that begins at token `first`.
  std::vector<float> append_chunk(int sequence, std::uint32_t layer, std::uint32_t first,
                                  std::uint32_t tokens, std::span<const float> qkv) {
    qkv_.assign(own_rows(qkv));
    const auto count = static_cast<std::uint32_t>(qkv.size() / kRow);
    const kvlab_append_chunk chunk{.struct_size = sizeof chunk,
                                   .sequence = sequence,
                                   .layer = static_cast<int>(layer),
                                   .tokens = tokens,
                                   .ends_prompt = 1,
                                   .first = first,
                                   .count = count,
                                   .qkv = qkv_.data(),
                                   .out = out_.data()};
    done(kvlab_kv_cache_append(slots_, &chunk, stream_.get()));
    return outputs(count);
  }
  void begin_step(const std::vector<unsigned char>& decodes = {}) {
    done(kvlab_kv_cache_begin_step(slots_, decodes.empty() ? nullptr : decodes.data(),
                                   stream_.get()));
  }
  void launch(std::uint32_t layer) {
    done(kvlab_kv_cache_step(slots_, static_cast<int>(layer), qkv_.data(), out_.data(), nullptr,
                             stream_.get()));
  }
  std::vector<float> step(std::uint32_t layer, std::span<const float> qkv) {
    qkv_.assign(own_rows(qkv));
    launch(layer);
    return outputs(static_cast<std::uint32_t>(sequences_));
  }
  void begin_drafts(const std::vector<std::uint32_t>& tokens) {
    done(kvlab_kv_cache_begin_drafts(slots_, tokens.data(), stream_.get()));
  }
  std::vector<float> verify(std::uint32_t layer, std::span<const float> qkv) {
    qkv_.assign(own_rows(qkv));
    done(kvlab_kv_cache_verify_drafts(slots_, static_cast<int>(layer), qkv_.data(), out_.data(),
                                      nullptr, stream_.get()));
    return outputs(static_cast<std::uint32_t>(qkv.size() / kRow));
  }
  void accept(const std::vector<std::uint32_t>& tokens) {
    done(kvlab_kv_cache_accept_drafts(slots_, tokens.data(), stream_.get()));
  }
  std::vector<std::uint32_t> kept(int sequence, std::uint32_t layer, std::uint32_t head) {
    std::vector<std::uint32_t> positions(kMostRows);
    std::uint32_t count = 0;
    done(kvlab_kv_cache_positions(slots_, sequence, static_cast<int>(layer), static_cast<int>(head),
                                  positions.data(), kMostRows, &count, stream_.get()));
    positions.resize(count);
    return positions;
  }
  void start(int sequence) { done(kvlab_kv_cache_start(slots_, sequence, nullptr, stream_.get())); }
  void copy(int from, int to) { done(kvlab_kv_cache_copy(slots_, from, to, stream_.get())); }
  kvlab_sequence_info held(int sequence = 0) {
    kvlab_sequence_info held{.struct_size = sizeof held};
    done(kvlab_kv_cache_sequence_info(slots_, sequence, &held));
    return held;
  }
  kvlab_kv_cache* get() const { return slots_; }
  /// Number of elements of a token's outputs.
  std::size_t queries() const { return heads_.count * kGroup * kSize; }
  void* rows() const { return qkv_.data(); }

 private:
  std::size_t row() const { return queries() + 2 * heads_.count * kSize; }
  /// Returns the part of each row that belongs to the cache's heads.
  std::vector<float> own_rows(std::span<const float> qkv) const {
    std::vector<float> own;
    for (; !qkv.empty(); qkv = qkv.subspan(kRow)) {
      const auto take = [&](std::size_t first, std::size_t count) {
        const auto part = qkv.subspan(first, count);
        own.insert(own.end(), part.begin(), part.end());
      };
      take(heads_.first * kGroup * kSize, queries());
      for (std::size_t first = kQueries; first < kRow; first += kHeads * kSize)
        take(first + heads_.first * kSize, heads_.count * kSize);
    }
    return own;
  }
  std::vector<float> outputs(std::uint32_t tokens) {
    check_cuda(cudaStreamSynchronize(stream_.get()));
    auto out = out_.to_host();
    out.resize(tokens * queries());
    return out;
  }

  Stream stream_;
  std::size_t sequences_;
  OwnHeads heads_;
  DeviceArray<float> qkv_{kMostRows * kRow}, out_{kMostRows * kQueries};
  kvlab_kv_cache* slots_ = nullptr;
};

/// The CPU's caches, with the same appends.
class Host {
 public:
  explicit Host(const ResolvedConfig& config) {
    const HeadShape shape{.head_size = kSize,
                          .group = kGroup,
                          .positions = config.positions,
                          .softmax_scale = kScale,
                          .threshold16 = config.threshold16()};
    for (std::uint32_t layer = 0; layer < kLayers; ++layer)
      layers_.emplace_back(config, shape, kHeads, layer);
  }
  std::vector<float> attend(std::uint32_t layer, std::uint32_t fed, bool ends,
                            std::span<const float> qkv) {
    const auto tokens = static_cast<std::uint32_t>(qkv.size() / kRow);
    std::vector<float> q, k, v, out(tokens * kQueries), lse(tokens * kHeads * kGroup);
    for (std::size_t t = 0; t < tokens; ++t) {
      const auto row = qkv.begin() + static_cast<std::ptrdiff_t>(t * kRow);
      const auto keys = row + kQueries, values = keys + kHeads * kSize;
      q.insert(q.end(), row, keys);
      k.insert(k.end(), keys, values);
      v.insert(v.end(), values, values + kHeads * kSize);
    }
    LayerCache& cache = layers_[layer];
    cache.step({fed, tokens, q.data(), k.data(), v.data(), out.data(), lse.data()},
               rope_.covering(fed + tokens), 1);
    if (ends) cache.end_prompt();
    return out;
  }
  /// The positions of the tokens that a KV head keeps.
  std::vector<std::uint32_t> kept(std::uint32_t layer, std::uint32_t head) const {
    const auto positions = layers_[layer].heads()[head].live().positions();
    return {positions.begin(), positions.end()};
  }

 private:
  GrowingRope rope_{rope()};
  std::deque<LayerCache> layers_;
};

inline double worst(const std::vector<float>& a, const std::vector<float>& b) {
  double worst = 0, largest = 0;
  REQUIRE(a.size() == b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    worst = std::max(worst, std::fabs(double{a[i]} - double{b[i]}));
    largest = std::max(largest, std::fabs(double{b[i]}));
    if (!std::isfinite(a[i])) return INFINITY;
  }
  return worst / largest;
}

class SampledRows {
 public:
  std::vector<float> rows(std::uint32_t tokens) {
    std::vector<float> values(tokens * kRow);
    for (float& value : values) value = normal_(random_);
    return values;
  }

 private:
  std::mt19937 random_{7};
  std::normal_distribution<float> normal_;
};

inline ResolvedConfig resolved(const char* policy, std::uint32_t budget) {
  return resolve({.policy = parse_policy(policy), .budget = {.extent = tokens(budget)}}, kTokens, 0,
                 kModel);
}

}  // namespace kvlab
