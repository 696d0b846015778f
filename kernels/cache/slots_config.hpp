// What caches of slots are made for: plain numbers, resolved. Whoever drives them says where these
// come from: a model's configuration, a policy file, a struct of kvlab.h.
#pragma once

#include <algorithm>
#include <functional>
#include <span>
#include <vector>

#include "kernels/attention.hpp"
#include "kernels/device_limits.hpp"
#include "kernels/evict/eviction_kernels.hpp"
#include "kernels/evict/features.hpp"
#include "kernels/quantized/quantized_cache.hpp"
#include "policies/modifiers/modifiers.hpp"
#include "policies/rule.hpp"
#include "policies/tiers/tier_plan.hpp"

namespace kvlab::kernels {

/// A table of RoPE: frequencies, of half the channels that turn, and a factor on cos and sin.
struct SlotRope {
  std::vector<float> inv_freq = {};
  float factor = 1;

  int rotated_dims() const { return 2 * static_cast<int>(inv_freq.size()); }
};

/// A layer that the policy acts on.
struct SlotLayer {
  std::uint32_t number = 0;  ///< as the model counts: Step::layer
  float softmax_scale = 1;
  std::uint32_t table = 0;       ///< of RoPE
  const float* sinks = nullptr;  // [query_head], device: as AttentionShape has them
  const void* output = nullptr;  // W_o, as FeatureArgs has it
};

/// What a sequence's caches have in common.
struct SlotSequence {
  Modifiers modifiers = {};
  std::vector<std::byte> params = {};  ///< as kvlab_policy_state has them, and what follows
  std::uint32_t threshold16 = 655;
  std::uint64_t seed = 0;
  std::uint32_t id = 0;
  /// After a prompt, from the places of each KV head's live tokens: what budgets the heads of a
  /// layer have from then on, in the slots that they have together. Null: those that they had.
  std::function<std::vector<std::uint32_t>(std::span<const std::vector<EvictionKey>>)> share = {};
};

/// One KV head of one sequence in one layer.
struct SlotPair {
  std::uint32_t budget = kUnlimited;  ///< kUnlimited: nothing is evicted
  ProtectedTokens protected_tokens = {};
  std::vector<TierSlots> tiers = {};  ///< empty: the budget's in 16 bit
  std::uint32_t max_budget = 0;       ///< what it can come to where budgets are shared
};

struct SlotsConfig {
  Type type{};
  int query_heads = 0, kv_heads = 0, head_size = 0;
  std::vector<SlotLayer> layers = {};
  std::vector<SlotRope> ropes = {};
  bool other_ropes = false;  ///< somebody else needs their rows, whatever `numbering` says
  std::vector<SlotSequence> sequences = {};
  std::vector<SlotPair> pairs = {};  ///< [layer, sequence, kv_head]
  std::uint32_t max_tokens = 0;      ///< of a sequence; 0: no limit, where all have budgets
  EvictionKernels kernels{};
  kvlab_positions numbering = KVLAB_ORIGINAL;
  /// A prompt's queries by how many are younger: their weights, and the tail. For policies that
  /// weigh them.
  std::function<std::uint32_t(std::span<const std::byte> params, std::span<float> to)> weigh = {};
  kvlab_columns_args features{};  ///< which ones, and `hidden` of SlotLayer::output
  bool norms_keys = false;        ///< so that what is projected is no plain key
  std::uint32_t part = 2048;      ///< tokens of an append that go through a layer together, at most
  int workspaces = 1;             ///< of steps' attentions
  bool watched = false;           ///< what each token received in a step is kept

  /// Most rows that go through a layer together.
  int rows() const { return std::max(static_cast<int>(part), static_cast<int>(sequences.size())); }
  bool observes() const { return kernels.needs != Needs::nothing; }
  bool is_quantized() const {
    return std::ranges::any_of(pairs, [](const SlotPair& pair) {
      return !pair.tiers.empty() && !pair.tiers.back().format->exact();
    });
  }
  /// Whether tokens are evicted otherwise than step by step, or shared.
  bool has_modifiers() const {
    return std::ranges::any_of(sequences, [](const SlotSequence& one) {
      return one.modifiers != Modifiers{} || one.share;
    });
  }
  /// Whether the fast kernels have what is asked: they rotate whole heads, or none.
  bool is_fast() const {
    const bool whole =
        numbering == KVLAB_ORIGINAL || std::ranges::all_of(layers, [&](const SlotLayer& layer) {
          return ropes[layer.table].rotated_dims() == head_size;
        });
    return whole &&
           (!is_quantized() || (type != KVLAB_F32 && query_heads <= kMaxTierGroup * kv_heads));
  }
  /// Bytes of one token's key in one head, or of its value.
  std::size_t key_bytes() const { return static_cast<std::size_t>(head_size) * bytes_of(type); }
  /// One layer's cache, but for where its memory is.
  kvlab_cache slot_cache(int of_sequences, int max_slots) const {
    return {.type = type,
            .sequences = of_sequences,
            .query_heads = query_heads,
            .kv_heads = kv_heads,
            .head_size = head_size,
            .softmax_scale = layers.empty() ? 1 : layers.front().softmax_scale,
            .max_slots = max_slots};
  }
};

DeviceFormat device_format(const KvFormat& format);

/// How a policy is launched on the current device: by the fast kernels, or by plain ones where the
/// fast ones lack what is asked or need more shared memory than the device has. `config` is
/// complete but for its own kernels. Throws std::invalid_argument where neither can be launched.
/// A policy that the library compiled from a header has no plain kernels.
enum class PlainKernels { present, absent };
EvictionKernels kernels_for(const SlotsConfig& config, const DevicePolicy& policy,
                            PlainKernels plain);
EvictionKernels kernels_for(const SlotsConfig& config, const DevicePolicy& policy,
                            PlainKernels plain, const DeviceLimits& limits);

}  // namespace kvlab::kernels
