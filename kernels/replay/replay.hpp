// Replay on the device: many caches (each one KV head under one configuration) over the same
// queries and keys. Queries come in blocks, in order. replay_rows() computes the full cache's
// exponentials of a block. A policy's walk takes every cache through its queries and stores what
// the cache kept. replay_outputs(), replay_changes() and replay_metrics() then measure all caches
// together.
//
// Words, each with one meaning here and in sim/device:
//
//   head task   one KV head with its group of query heads
//   head group  four query heads side by side, the last one padded: a float4
//   block       queries that are processed together, at most kMaxReplayQueries (CUDA's blocks are
//               called thread blocks)
//   query group kReplayAhead queries of a block
//   cache       a head task under a configuration; numbered [head task, configuration]
//   member      a configuration that one launch of a walk handles
//   slot        memory of a cache for a live token, in no order
//   position    a token's index in the sequence
//   cache position   with cache positions: the newest token's position minus the number of younger
//               live tokens
//   row         a query's exponentials of all tokens, [head group, token]; each head's largest is 1
//   shared      used by all caches of a head task, as rows are (also CUDA's shared memory)
//   direct      of one cache: exponentials that it computes itself, [head group, slot]
//   old         at cache positions, a token older than an evicted one; its exponentials are direct
//   measured    the queries that metrics cover; index: a query's number among them
//   sample      every sample_every-th measured query, whose outputs are measured
//   kept set    the tokens that a cache attends to at a query, as bits
//   copy        all tokens as the tiers of a plan keep them; copy 0 holds the exact ones
//   terms       a query's gradients times a token's value
//   fp16 copy   a configuration with the same kept sets in 16 bits, which has only metrics
//
// Rows, sums and outputs are float32. Array shapes follow a field, with the fastest index last.
#pragma once

#include <cuda_runtime.h>

#include "kernels/evict/eviction.hpp"
#include "sim/metrics/sums.hpp"

namespace kvlab::kernels {

inline constexpr int kMaxReplayQueries = 64;    ///< queries per block
inline constexpr int kMaxReplayGroup = 8;       ///< query heads per KV head
inline constexpr int kMaxReplayHeadSize = 256;  ///< a multiple of 4
inline constexpr int kReplayAhead = 8;          ///< queries per query group
inline constexpr int kReplayGranule = 16;  ///< pairs of dimensions are padded to a multiple of it
inline constexpr int kReplayTile = 4;      ///< configurations whose outputs are one product
inline constexpr int kMaxLayerHeads = 8;   ///< KV heads that may keep one set of tokens
/// Directions of the residual stream, one per lane of a warp
inline constexpr int kReplayResiduals = 32;
inline constexpr int kMostReplayGradientSamples = 64;  ///< gradient samples
inline constexpr int kMaxReplayTiers = 8;              ///< tiers of a tier plan
inline constexpr int kMaxReplayCopies = 31;            ///< copies of quantized tokens
inline constexpr int kMaxReplayParts = 3;  ///< parts of a value read from quantized values

/// How many numbers of a type add up to a float32.
constexpr int replay_parts(Type type) {
  return type == KVLAB_F32 ? 1 : type == KVLAB_F16 ? 2 : kMaxReplayParts;
}

constexpr dim3 grid_of(int x, int y = 1, int z = 1) {
  return {static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z)};
}

// Arguments that several kernels share.

struct ReplayShape {
  int tasks;  ///< head tasks that are replayed together
  int tokens, group, head_size, rotated;
  float softmax_scale;
  Type type;      ///< of keys and values
  Type rounding;  ///< type of q and k after RoPE at original positions; f32: they are not rounded
  std::uint32_t threshold16;  ///< request threshold, in units of 2^-16

  constexpr int head_groups() const { return (group + 3) / 4; }
  /// 32-bit words of a kept set.
  constexpr int words() const { return (tokens + 31) / 32; }
  /// Pairs of dimensions, padded. Pair p < rotated / 2 is dimensions p and p + rotated / 2, which
  /// rotate together; later pairs are neighbours among the dimensions that do not rotate.
  constexpr int pairs() const {
    return (head_size / 2 + kReplayGranule - 1) / kReplayGranule * kReplayGranule;
  }
  /// Whether the number of head tasks fits a dimension of a grid, and the group fits a row of head
  /// groups.
  constexpr bool is_launchable() const {
    return tasks > 0 && tasks <= 65535 && group > 0 && group <= kMaxReplayGroup &&
           head_size <= kMaxReplayHeadSize && head_size % 4 == 0;
  }
  /// The first element of a token's key or value, among all head tasks.
  constexpr std::int64_t vector(std::int64_t task, std::int64_t token) const {
    return (task * tokens + token) * head_size;
  }
};

/// Which queries are measured. The outputs of every `sample_every`-th measured query are compared.
struct ReplayMeasured {
  const std::int32_t* index;  // [token]: the query's index among measured queries, or -1
  int size, blocks, sample_every;
  const int2* named;  // [named_count]: passages, tokens [x, y) whose recall is measured at the
                      // queries after them
  int named_count;

  constexpr bool samples(int which) const { return which >= 0 && which % sample_every == 0; }
};

/// A block of queries, for every head task: [head task, query of the block, …]; head tasks are
/// `block` queries apart.
struct ReplayRows {
  int first, count, block;
  float4* e;      // [head group, token]: exponentials, the row's largest is 1; copies follow
  float4* sums;   // [head group]
  float4* least;  // [head group]: the least e at which the full row requests a token; infinite for
                  // padding
  uint4* wanted;  // [head group]: number of earlier tokens that the query requests, if it is
                  // measured

  constexpr bool is_launchable() const { return count > 0 && count <= block; }
  /// The index of query i of the block among all head tasks.
  constexpr std::int64_t row(std::int64_t task, int i) const { return task * block + i; }
};

/// Rows of queries and keys that were not rounded, for caches with cache positions.
struct ReplayCachePositionRows {
  // [head group, token]: like ReplayRows::e, and the same array if nothing is rounded; or null
  float4* e;
  float4* most;  // [head group]: the row's largest logit
  /// [query group, pairs / 8, tile, lane of a warp]: queries before RoPE as operands of float16
  /// products. A tile is 8 columns (query, head of head groups) of the query group. Step 2 i + s
  /// has, for lane l, column l / 4: pairs 16 i + 4 (l % 4) + 2 s and the next one, their first
  /// elements (x), their second elements (y), and the float16 rounding errors of these (z, w). A
  /// query is multiplied by a power of two, as keys are in replay_pair_keys().
  uint4* fragments;
  float4* scales;  // [head group]: softmax_scale, and the factor that undoes that multiplication
};

/// Inputs of direct exponentials and outputs. Angles are given as cos and sin.
struct ReplayTensors {
  const float* queries;  // [head task, token, group, dim], rotated, not rounded
  const void* keys;      // [head task, token, dim], before RoPE
  const void* values;    // [head task, token, dim]
  const float2* rope;    // [position, rotated / 2]
  const float2* coarse;  // [position / 64, pairs]: rope table of the multiples of 64
  const float2* fine;    // [64, pairs]: rope table of positions 0 to 63, without RoPE's factor
};

/// Tokens as read from their quantized values (rotated back): one copy of all tokens for each
/// demotion path. Copy 0, the exact tokens, is not stored here.
struct ReplayCopies {
  int count;  ///< 0: no configuration is quantized
  // [copy, part, head task, token, dim]: keys of shape.rounding, values of shape.type
  void *keys, *values;
  std::int64_t vectors;  ///< elements of a part: head tasks * tokens * dim
  /// Number of float4 of a copy's exponentials: head tasks * queries * head groups * tokens
  std::int64_t rows;
  std::int64_t terms;  ///< float32 of a copy's terms

  /// Part 0 of a copy (1 or later); the next parts are `vectors` elements further.
  constexpr std::int64_t first_part(int copy, Type type) const {
    return std::int64_t{copy - 1} * replay_parts(type) * vectors;
  }
};

/// Tokens that are appended together.
struct ReplayAppend {
  std::uint32_t first, tokens;
  bool ends_prompt = false;
};

/// A tier of a cache, and the copy that its tokens belong to.
struct ReplayTier {
  std::uint32_t slots, copy;
};

/// The rules of one cache.
struct ReplayRule {
  kvlab_rule rule;
  Modifiers modifiers;
  std::uint32_t evict_at;  ///< number of live tokens at which tokens are evicted; kUnlimited: never
  bool looks_back;         ///< it matters whether a prompt segment has just ended
  bool cache_positions;    ///< live tokens are numbered by cache position
  std::uint64_t seed;
  std::uint32_t sequence, layer, kv_head;
  std::int64_t first_slot;  ///< among the head task's slots
  std::uint32_t slots;      ///< the most tokens that are ever live
  std::uint32_t num_appends;
  const ReplayAppend* appends;  ///< ends with an append of no tokens
  const std::byte* params;
  const float* features;  ///< [token, features that the policy reads]
  std::uint32_t tiers,
      first_tier;  ///< number of tiers (0: no tier plan) and the first one in ReplayTierArgs::tiers
  std::uint32_t copies;    ///< bits of the copies that its tokens may belong to
  std::int32_t fp16_copy;  ///< index, or -1
};

/// All caches.
struct ReplaySweep {
  const ReplayRule* rules;  // [head task, configuration]
  int configs;              ///< configurations per head task
  /// The number of KV heads of a configuration, if each configuration has separate head tasks, as
  /// in the end-to-end evaluation: head task u is KV head u % config_tasks of configuration u /
  /// config_tasks, and a cache is a head task. 0: every head task goes through every configuration.
  int config_tasks;

  /// The n-th head task of a configuration.
  constexpr int task_of(int config, int n) const {
    return config_tasks ? config * config_tasks + n : n;
  }
  constexpr std::int64_t cache_of(std::int64_t task, int config) const {
    return config_tasks ? task : task * configs + config;
  }
  /// Whether a cache's tokens belong to other copies than the exact one.
  constexpr bool is_quantized(std::int64_t task, int config) const {
    return rules[cache_of(task, config)].copies > 1;
  }
};

/// What a cache kept at a query.
struct ReplayKept {
  float sums[kMaxReplayGroup];  ///< of the kept exponentials
  std::uint32_t whole;          ///< all tokens are kept, so there is no error
  std::uint32_t direct;         ///< direct values and changes must be added
};

/// The output of the walks, [cache, …]. Kept sets are stored for every `every`-th measured query;
/// for all of them, if there are gradients. The k-th kept set is at k % capacity, and measured
/// sample s at s % samples.
struct ReplayKeptSets {
  int every, capacity;
  int samples;            ///< of a block of queries, at most
  ReplayKept* kept;       // [kept set]
  std::uint32_t* shared;  // [kept set, words]: bits of the tokens whose exponentials are the row's
  std::uint32_t* quantized;  // [kept set, copy from 1 on, words]: bits of quantized tokens; or null
  float* values;             // [sample, group, dim]: direct exponentials times values
  float* changes;            // [kept set, gradient sample, group]: direct exponentials times terms

  /// Index of the kept set of measured query `index`; the next function gives its sample.
  constexpr std::int64_t kept_of(std::int64_t cache, int index) const {
    return cache * capacity + index / every % capacity;
  }
  constexpr std::int64_t sample_of(const ReplayMeasured& measured, std::int64_t cache,
                                   int index) const {
    return cache * samples + index / measured.sample_every % samples;
  }
};

/// A block, and all caches that process it.
struct ReplayBlock {
  ReplayShape shape;
  ReplayMeasured measured;
  ReplayRows rows;
  ReplaySweep sweep;
  ReplayKeptSets sets;
};

/// Gradients of a block's queries times values.
struct ReplayTerms {
  int gradient_samples;  ///< 0: none
  int first;             ///< index of the block's first measured query
  float* of;  // [head task, token, query, gradient sample, group], kMaxReplayQueries apart; copies
              // follow
};

/// Configurations in groups of kReplayTile with one kind of positions; -1: none. Configurations
/// without quantization come first.
struct ReplaySets {
  const std::int32_t* of;
  int tiles, quantized_tiles;

  /// Only the configurations with quantization.
  constexpr ReplaySets quantized_only() const {
    return {of + tiles * kReplayTile, quantized_tiles, 0};
  }
};

/// The part of a full row that a cache's kept set has, [cache, query of the block, head of head
/// groups].
struct ReplayCounts {
  float* kept;          ///< sums of exponentials; negative: all tokens are kept
  std::uint32_t* hits;  ///< requested tokens before the query, unless all tokens are kept
};

// Vectors, computed before the first block.

/// Vectors [row, dim] before RoPE, `stride` elements apart.
struct ReplayVectors {
  const void* data;
  Type type;
  std::int64_t stride;
};

/// Rotates vectors to their positions; a row for each token.
struct ReplayRotateArgs {
  ReplayVectors from;
  const float2* rope;
  int tokens, head_size, rotated;
  Type rounding;
  int group = 1, group_head = 0;  ///< row t goes to [t, group_head] of [tokens, group, dim]
  float* plain = nullptr;         // result without rounding, or null
  float* parts = nullptr;   // as in replay_query_parts(), [row, 3, dim]: kept, left, kept; or null
  void* rounded = nullptr;  // result in type `rounding`, or null
};
cudaError_t replay_rotate(const ReplayRotateArgs& args, cudaStream_t stream);

/// Splits a block's queries [head task, token, group, dim] into TF32 parts, for float32 products on
/// tensor cores: the rounded part, the same again, and the rest, to [head task, query of the block,
/// group, 3, dim]. With keys split into kept, left, kept, only the product of the two rests is
/// missing (2^-22).
cudaError_t replay_query_parts(const ReplayShape& shape, int first, int count, int block,
                               const float* queries, float* to, cudaStream_t stream);

/// Arranges the keys of one head task, a row per token, as [token, pairs / 4, half, 4]: the first
/// elements of four pairs, then their second elements, multiplied by a power of two that brings a
/// key's largest element to [2^10, 2^11). The inverse factor goes to `scales` [token].
cudaError_t replay_pair_keys(const ReplayShape& shape, int tokens, const ReplayVectors& from,
                             Type type, void* to, float* scales, cudaStream_t stream);

struct ReplayDemotionPath;  // kernels/replay/copies.hpp

/// Makes all copies of keys (after RoPE) or of values from the exact ones.
struct ReplayQuantizeArgs {
  ReplayShape shape;
  ReplayCopies copies;
  const ReplayDemotionPath*
      paths;  // [copy], or, if configurations have separate head tasks, [configuration, copy]
  int config_tasks;  ///< see ReplaySweep
  bool keys;
  Type type;
  const void* exact;  // [head task, token, dim]
};
cudaError_t replay_quantize(const ReplayQuantizeArgs& args, cudaStream_t stream);

// A block: its rows.

/// The input is products [head task, query of the block, head, token] of rotated queries and keys.
struct ReplayRowsArgs {
  ReplayShape shape;
  ReplayMeasured measured;
  ReplayRows rows;
  ReplayCachePositionRows cache_positions;
  const float* products;
  const float* unrounded;  ///< for cache_positions.e; null: it is rows.e
  const float*
      plain_queries;  // [head task, token, group, dim], before RoPE: for cache_positions.fragments
  const float2* rope;
  const void* values;
  float* outputs;      // [head task, query of the block, group, dim]: the full cache's outputs of
                       // samples; or null
  float4* exact_most;  // [head task, query of the block, head group]: the largest logit; or null
};
/// Bytes: products are read once; rows.e (and cache_positions.e) is written once, 16 bytes per head
/// group and token.
cudaError_t replay_rows(const ReplayRowsArgs& args, cudaStream_t stream);

/// The rows of one copy's keys, from their products, relative to the exact rows' maximum.
cudaError_t replay_quantized_rows(const ReplayRowsArgs& args, const ReplayCopies& copies, int copy,
                                  cudaStream_t stream);

/// Causal softmax of such products, for one exact pass of attention. Products that a query may not
/// see become 0.
struct ReplaySoftmaxArgs {
  ReplayShape shape;
  int first, count, block;
  const float* products;
  Type type;
  void* to;  // like products, of type `type`
};
cudaError_t replay_softmax(const ReplaySoftmaxArgs& args, cudaStream_t stream);

// A block: its walks.

/// The state of a cache between two blocks. All zero at first.
struct ReplayProgress {
  std::uint64_t evictions;
  std::uint32_t live, max_live, append;
  std::int32_t victim;  ///< slot + 1 of the token that is evicted next; 0: not known
  std::uint32_t victim_position;
  std::uint32_t gone;  ///< with cache positions: one past the youngest token that was evicted
};

/// The slots of all caches, [head task, slot of the head task].
struct ReplaySlots {
  std::int64_t of_task;  ///< slots per head task
  int state_stride;      ///< bytes of a state, a multiple of 8
  std::byte* states;
  std::uint32_t *positions, *holes, *fillers;
  std::uint64_t* ranks;
  Observation* seen;
  float4* direct;  // [head task, plane, head group, slot]
  int planes;      ///< kReplayAhead if a cache uses cache positions, otherwise 1
};

/// Arguments of a kernel that stores kept sets.
struct ReplayKeepArgs : ReplayBlock {
  ReplayTensors tensors;
  ReplayTerms terms;
  ReplayCounts counts;
  std::uint32_t* kept_bits;  // [cache, token, words]: must be zero before; or null
};
/// Arguments of every walk.
struct ReplayWalkArgs : ReplayKeepArgs {
  ReplaySlots slots;
  ReplayProgress* progress;     // [cache]
  const std::int32_t* members;  ///< configurations with one policy
  /// With scope=layer, where all heads of a layer keep the same tokens: the number of KV heads of a
  /// layer, at most kMaxLayerHeads; needs sm_90. A member's head tasks are then whole layers, one
  /// after another. Otherwise 0.
  int layer_heads;
  std::uint32_t max_slots;  ///< of a member, at most
  double* sums;             // [cache, SumsShape]: sums for passages; null: no metrics
};
/// Additional arguments with cache positions.
struct ReplayCachePositionArgs : ReplayWalkArgs {
  ReplayCachePositionRows cache_positions;
  const void* paired_keys;  // [head task, token, 2 pairs] of shape.type: see replay_pair_keys()
  const float* key_scales;  // [head task, token]: factors for paired_keys
  std::uint32_t* positions_in_cache;  // [head task, slot of the head task]
};
/// Additional arguments with tiers.
struct ReplayTierArgs : ReplayWalkArgs {
  ReplayCopies copies;
  const ReplayTier* tiers;
  int max_tiers;             ///< of a member, at most
  std::uint8_t* slot_tiers;  // [head task, slot of the head task]
};

/// How a cache keeps tokens: exact at original positions, numbered by cache position, or on tiers.
enum class ReplayTokens { exact, cache_positions, tiered };
/// The parameters that a walk is compiled for.
struct WalkVariant {
  int head_groups;
  ReplayTokens tokens;
  bool in_shared;        ///< slots lie in shared memory
  Type type;             ///< of keys and values
  bool largest = false;  ///< a group gives a token the mass of its largest head (group=max)
};
/// Members of one launch, whose slots may lie in shared memory.
struct ReplayMembers {
  int count;
  ReplayTokens tokens;
  bool largest;
  std::size_t slot_bytes;  ///< bytes of a state
  int max_tiers;           ///< of a tier plan, at most; 0: no member has a tier plan
};
/// How the members' walk is launched on the current device.
struct ReplayWalkPlan {
  WalkVariant variant;
  dim3 grid;
  unsigned threads;
  std::size_t shared_bytes, max_shared_bytes;
  int multiprocessors;
};
/// Returns cudaErrorNotSupported if walk_fits() of kernels/launch_plans.hpp is false.
cudaError_t plan_walk(const ReplayWalkArgs& args, const ReplayMembers& members,
                      ReplayWalkPlan& plan);
/// Takes the members' caches through the block of queries. `kernel`: walk_caches() (walk.cuh) of
/// their policy and the plan's variant. `args`: of the type for the variant's tokens,
/// ReplayWalkArgs, ReplayCachePositionArgs or ReplayTierArgs.
cudaError_t replay_walk(const void* kernel, const ReplayWalkPlan& plan, const ReplayWalkArgs& args,
                        cudaStream_t stream);
/// The number of waves in which its thread blocks run on the current device, if nothing else runs.
/// The kernel must have been launched before.
cudaError_t replay_waves(const void* kernel, const ReplayWalkPlan& plan, int& waves);

/// The result of walks, for all members at once, if their policies evict the oldest token first: a
/// query attends to its append's sinks and a window, so no cache has to be walked. Uses no slots.
struct ReplayWindowsArgs : ReplayKeepArgs {
  ReplayCachePositionRows cache_positions;
  const std::int32_t* members;
  int member_count;
};
/// Bytes: rows are read once for all members.
cudaError_t replay_windows(const ReplayWindowsArgs& args, cudaStream_t stream);

// A block: its measurements.

/// Arguments of a kernel that reads the kept sets of all configurations.
struct ReplayKeptArgs : ReplayBlock {
  const float4* cache_positions;  ///< ReplayCachePositionRows::e
  ReplaySets configs;
  ReplayCopies copies;
};
/// The outputs of the block's sampled queries in every cache: their errors relative to the full
/// cache's outputs, or, if configurations have separate head tasks, the outputs themselves.
struct ReplayOutputsArgs : ReplayKeptArgs {
  const void* values;
  const float* full;   ///< ReplayRowsArgs::outputs
  double2* errors;     // [cache, sample, kMaxReplayGroup]: squared error, squared output
  bool stores_errors;  ///< stores the errors of each dimension in sets.values
  void* outputs;  // [configuration, token, KV head of config_tasks, group, dim] of shape.type; or
                  // null
};
/// Bytes: values are read once per sampled query and 8 tiles of configurations.
cudaError_t replay_outputs(const ReplayOutputsArgs& args, cudaStream_t stream);
/// The part of replay_outputs() for configurations with quantization. Without separate head tasks,
/// args.configs has only such configurations.
cudaError_t replay_quantized_outputs(const ReplayOutputsArgs& args, cudaStream_t stream);

/// How the block's kept sets change the log-likelihood of the gradient samples.
struct ReplayChangesArgs : ReplayKeptArgs {
  ReplayTerms terms;
  const float* term_scales;  // [head task, measured query]: factors for terms
  float* changes;  // [cache, measured query, gradient sample]: change of the log-likelihood
};
/// Bytes: terms are read once per 16 configurations.
cudaError_t replay_changes(const ReplayChangesArgs& args, cudaStream_t stream);

/// Adds a block's counts and errors to the metrics, in order.
struct ReplayMetricsArgs : ReplayBlock {
  int fp16_copies;  ///< the last `fp16_copies` configurations are fp16 copies, which add no counts
  int samples;      ///< measured samples
  ReplayCounts counts;
  const double2* block_errors;  // [cache, sample, kMaxReplayGroup]
  // [cache, sample, kReplayResiduals]: errors multiplied by W_o; or null
  const float* block_residual;
  double* sums;     // [cache, SumsShape]
  float* recalls;   // [cache, head, measured query]
  double* errors;   // [cache, sample, 2]: squared error and squared output, summed over the group
  float* residual;  // [cache, sample, kReplayResiduals]; or null
};
cudaError_t replay_metrics(const ReplayMetricsArgs& args, cudaStream_t stream);

}  // namespace kvlab::kernels
