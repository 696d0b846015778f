// The configuration of a KvCache, as plain numbers. The caller takes them from a model's
// configuration, a policy file, or a struct of kvlab.h.
#pragma once

#include <algorithm>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "kernels/attention.hpp"
#include "kernels/device_limits.hpp"
#include "kernels/evict/eviction_kernels.hpp"
#include "kernels/evict/features.hpp"
#include "kernels/quantized/quantized_cache.hpp"
#include "policies/modifiers/modifiers.hpp"
#include "policies/rule/eviction_order.hpp"
#include "policies/tiers/key_centre.hpp"
#include "policies/tiers/tier_plan.hpp"

namespace kvlab::kernels {

/// A RoPE table: frequencies, one per two rotated channels, and a factor on cos and sin.
struct SlotRope {
  std::vector<float> inv_freq = {};
  float factor = 1;

  int rotated_dims() const { return 2 * static_cast<int>(inv_freq.size()); }
};

/// A layer that the policy acts on.
struct SlotLayer {
  std::uint32_t number = 0;  ///< the model's layer index: Step::layer
  float softmax_scale = 1;
  std::uint32_t table = 0;       ///< index of the RoPE table
  const float* sinks = nullptr;  // [query_head], device: see AttentionShape
  const void* output = nullptr;  // W_o, see FeatureArgs
  /// With KvCacheConfig::pages: the layer's pools of blocks, which the caller owns.
  void *keys = nullptr, *values = nullptr;
};

/// Tensor parallelism under `scope=layer`: each of several devices has the same number of a layer's
/// KV heads, and tokens are evicted by the sum of their ranks over the heads of all devices.
struct RankGather {
  int devices = 1;
  /// Enqueues an all-gather on the stream: writes the `count` numbers at `own` of every device, in
  /// the order of the devices' heads, to `all` [device, count]. Throws if it fails. Null: ranks are
  /// summed over this device's heads only.
  std::function<void(const std::uint64_t* own, std::uint64_t* all, std::size_t count,
                     cudaStream_t stream)>
      gather = {};
};

/// Settings that all caches of a sequence share.
struct SlotSequence {
  Modifiers modifiers = {};
  std::vector<std::byte> params = {};  ///< params and the next members: as in kvlab_policy_state
  std::uint32_t threshold16 = 655;
  std::uint64_t seed = 0;
  std::uint32_t id = 0;
  KeyCentre centre = KeyCentre::none;  ///< has an effect only on tiers
  /// Called after a prompt, for each layer, with the eviction keys of each KV head's live tokens.
  /// Returns the new budgets of the layer's heads. The sum of these budgets must not change. Null:
  /// budgets do not change.
  std::function<std::vector<std::uint32_t>(std::span<const std::vector<EvictionKey>>)> share = {};
};

/// One KV head of one sequence in one layer.
struct SlotPair {
  std::uint32_t budget = kUnlimited;  ///< kUnlimited: nothing is evicted
  ProtectedTokens protected_tokens = {};
  std::vector<TierSlots> tiers = {};  ///< empty: the whole budget in 16 bits
  /// The centre of the keys [dim], for KeyCentre::constants. Empty: the keys are not centred, or
  /// the prompt gives the centre.
  std::vector<float> centre = {};
  std::uint32_t max_budget =
      0;  ///< if budgets are shared, the largest budget that the pair can get

  /// Whether the other pair has the same number of slots on the same tiers.
  bool has_slots_of(const SlotPair& other) const {
    return budget == other.budget && max_budget == other.max_budget &&
           std::ranges::equal(tiers, other.tiers);
  }
};

/// New settings of a sequence. Members without a value leave the setting unchanged.
struct SequenceSettings {
  struct Rule {
    std::uint32_t budget;
    ProtectedTokens protected_tokens;
  };
  std::vector<Rule> rules = {};  ///< [layer, kv_head], or empty
  std::optional<std::vector<std::byte>> params = {};
  std::optional<std::uint32_t> threshold16 = {};
  std::optional<std::uint64_t> seed = {};
  std::optional<std::uint32_t> id = {};
};

struct KvCacheConfig {
  Type type{};
  int query_heads = 0, kv_heads = 0, head_size = 0;
  std::vector<SlotLayer> layers = {};
  std::vector<SlotRope> ropes = {};
  /// Whether the caller also reads the rows of the RoPE tables. They are then filled for every
  /// `numbering`.
  bool other_ropes = false;
  std::vector<SlotSequence> sequences = {};
  std::vector<SlotPair> pairs = {};  ///< [layer, sequence, kv_head]
  std::uint32_t max_tokens =
      0;  ///< maximum length of a sequence; 0: no limit, if all pairs have budgets
  EvictionKernels kernels{};
  kvlab_numbering numbering = KVLAB_ORIGINAL_POSITIONS;
  /// For policies that weigh queries: writes the weights of a prompt's queries, indexed by the
  /// number of younger queries, and returns the index from which on all weights are 0.
  std::function<std::uint32_t(std::span<const std::byte> params, std::span<float> to)> weigh = {};
  /// The features to compute, and the `hidden` size of SlotLayer::output.
  kvlab_feature_args features{};
  bool norms_keys =
      false;  ///< the projection's output is normed in place, so it no longer holds the plain keys
  std::uint32_t part =
      2048;              ///< maximum number of an append's tokens that go through a layer together
  int workspaces = 1;    ///< number of workspaces for the attention of steps
  bool watched = false;  ///< keeps the observations of the last step
  std::uint32_t first_head = 0;  ///< as in kvlab_policy_state
  RankGather ranks = {};
  /// The caller's blocks of slots, with the block table of all sequences. Zeroed: the cache
  /// allocates keys and values itself.
  kvlab_pages pages{};
  /// Maximum number of tokens of a sequence that are verified together (the last token of the text,
  /// then its drafts). Every pair has slots for them after its live tokens. 0: no drafts.
  std::uint32_t draft_tokens = 0;
  /// Whether the parts of an append may go through the layers in any order, with steps of other
  /// sequences in between. This needs append memory for every layer.
  bool interleaves_appends = false;

  /// Maximum number of rows that go through a layer together.
  int rows() const { return std::max(static_cast<int>(part), draft_rows()); }
  /// Number of rows of a RoPE table, which has rows for an append's part, a step and drafts.
  int rope_rows() const {
    return static_cast<int>(part + sequences.size()) + (draft_tokens > 0 ? draft_rows() : 0);
  }
  /// Maximum number of rows of a decode step or of a verification.
  int draft_rows() const { return static_cast<int>(sequences.size() * std::max(draft_tokens, 1u)); }
  bool observes() const { return kernels.needs != Needs::nothing; }
  bool is_quantized() const {
    return std::ranges::any_of(pairs, [](const SlotPair& pair) {
      return !pair.tiers.empty() && !pair.tiers.back().format.exact();
    });
  }
  /// Whether keys of some sequence are centred.
  bool centres_keys() const {
    return is_quantized() && std::ranges::any_of(sequences, [](const SlotSequence& one) {
             return one.centre != KeyCentre::none;
           });
  }
  /// Whether keys of some sequence are centred by constants.
  bool has_constant_centres() const {
    return centres_keys() &&
           std::ranges::any_of(pairs, [](const SlotPair& pair) { return !pair.centre.empty(); });
  }
  /// Whether some sequence has modifiers, or shares the budgets of a layer among its heads.
  bool has_modifiers() const {
    return std::ranges::any_of(sequences, [](const SlotSequence& one) {
      return one.modifiers != Modifiers{} || one.share;
    });
  }
  /// Whether the fast kernels support this configuration. They rotate whole heads or nothing.
  bool is_fast() const {
    const bool whole = numbering == KVLAB_ORIGINAL_POSITIONS ||
                       std::ranges::all_of(layers, [&](const SlotLayer& layer) {
                         return ropes[layer.table].rotated_dims() == head_size;
                       });
    return whole &&
           (!is_quantized() || (type != KVLAB_F32 && query_heads <= kMaxTierGroup * kv_heads));
  }
  /// Number of ranks in memory for a compaction of `from`: this device's, then all devices'.
  std::size_t gathered_ranks(const kvlab_cache_view& from) const {
    if (!ranks.gather) return 0;
    return static_cast<std::size_t>(ranks.devices + 1) * static_cast<std::size_t>(from.sequences) *
           static_cast<std::size_t>(from.kv_heads) * static_cast<std::size_t>(from.max_slots);
  }
  /// Bytes of one token's key in one head. A value has the same size.
  std::size_t key_bytes() const { return static_cast<std::size_t>(head_size) * bytes_of(type); }
  /// The shape of attention over many queries, without scale, queries and pointers.
  kvlab_prefill_args prefill_shape() const {
    return {.type = type, .query_heads = query_heads, .kv_heads = kv_heads, .head_size = head_size};
  }
  /// One layer's cache, without pointers.
  kvlab_cache_view slot_cache(int num_sequences, int max_slots) const {
    return {.type = type,
            .sequences = num_sequences,
            .query_heads = query_heads,
            .kv_heads = kv_heads,
            .head_size = head_size,
            .softmax_scale = layers.empty() ? 1 : layers.front().softmax_scale,
            .max_slots = max_slots};
  }
};

DeviceFormat device_format(const KvFormat& format);

/// Whether a policy has plain kernels. One that the library compiled from a header has none.
enum class PlainKernels { present, absent };
/// Chooses the kernels of a policy for a device: the fast ones, or the plain ones if the
/// fast ones do not support the configuration or need more shared memory than the device has.
/// `config` must be complete except for its kernels. Throws std::invalid_argument if neither can be
/// launched. `limits`: those of the device; by default, of the current device.
EvictionKernels kernels_for(const KvCacheConfig& config, const DevicePolicy& policy,
                            PlainKernels plain);
EvictionKernels kernels_for(const KvCacheConfig& config, const DevicePolicy& policy,
                            PlainKernels plain, const DeviceLimits& limits);

}  // namespace kvlab::kernels
