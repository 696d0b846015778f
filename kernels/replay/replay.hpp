// Replay on the device: many caches, each one KV head under one configuration, over the same
// queries and keys. Queries come in blocks, in order: replay_rows() makes the full cache's
// exponentials of a block, a policy's walk takes every cache through its queries and leaves what it
// kept, and replay_outputs(), replay_changes() and replay_metrics() measure that, all caches'
// together.
//
// Words, each with one meaning here and in sim/device:
//
//   head task      one KV head with its group of query heads
//   head group      four query heads side by side, the last padded: a float4
//   block     queries that are taken together, at most kMaxReplayQueries (CUDA's is a thread block)
//   query group     kReplayAhead queries of a block
//   cache     a head task under a configuration; numbered [head task, configuration]
//   member    a configuration that one launch of a walk takes
//   slot      where a cache has a live token, in no order
//   position  a token's number in the sequence; cache position: where it stands if positions are cache positions,
//             the newest one's position less the number of younger live tokens
//   row       a query's exponentials of all tokens, [head group, token], the largest of each head 1
//   shared    of all caches of a head task, as rows are (and CUDA's shared memory)
//   direct    of one cache: exponentials that it computes itself, [head group, slot]
//   old       at cache positions, and has lost a younger token: what such a token is given is direct
//   measured  the queries that are measured; index: which of them a query is
//   sample    each sample_every-th query that are measured, whose outputs are measured
//   kept set  the tokens that a cache attends at a query, by bits
//   copy      all tokens as the tiers of a plan keep them; 0 are the exact ones
//   terms     a query's gradients by a token's value
//   fp16 copy      a configuration of the same kept sets in 16 bit, of which there are metrics alone
//
// Rows, sums and outputs are float32. Shapes stand behind a field, what runs fastest last.
#pragma once

#include <cuda_runtime.h>

#include "kernels/evict/eviction.hpp"
#include "sim/metrics/sums.hpp"

namespace kvlab::kernels {

inline constexpr int kMaxReplayQueries = 64;    ///< of a block
inline constexpr int kMaxReplayGroup = 8;       ///< query heads of a KV head
inline constexpr int kMaxReplayHeadSize = 256;  ///< a multiple of 4
inline constexpr int kReplayAhead = 8;          ///< queries of a query group
inline constexpr int kReplayGranule = 16;    ///< pairs of dimensions are padded to a multiple of it
inline constexpr int kReplayTile = 4;        ///< configurations whose outputs are one product
inline constexpr int kMaxLayerHeads = 8;     ///< KV heads that may keep one set
inline constexpr int kReplayResiduals = 32;  ///< directions of the residual stream: a warp's lanes
inline constexpr int kMostReplayGradientSamples = 64;  ///< of gradients
inline constexpr int kMaxReplayTiers = 8;              ///< of a tier plan
inline constexpr int kMaxReplayCopies = 31;            ///< of quantized tokens
inline constexpr int kMaxReplayParts = 3;  ///< of what has been read of quantized values

/// How many numbers of a type add up to a float32.
constexpr int replay_parts(Type type) {
  return type == KVLAB_F32 ? 1 : type == KVLAB_F16 ? 2 : kMaxReplayParts;
}

constexpr dim3 grid_of(int x, int y = 1, int z = 1) {
  return {static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z)};
}

// What several kernels take.

struct ReplayShape {
  int tasks;  ///< that are replayed together
  int tokens, group, head_size, rotated;
  float softmax_scale;
  Type type;      ///< of keys and values
  Type rounding;  ///< of q and k after RoPE at original positions; f32: they are not rounded
  std::uint32_t threshold16;  ///< of requests

  constexpr int head_groups() const { return (group + 3) / 4; }
  /// Of a kept set.
  constexpr int words() const { return (tokens + 31) / 32; }
  /// Pairs of dimensions, padded. Pair p < rotated / 2 is dimensions p and p + rotated / 2, which
  /// rotate together; later ones are neighbours of the rest, which do not rotate.
  constexpr int pairs() const {
    return (head_size / 2 + kReplayGranule - 1) / kReplayGranule * kReplayGranule;
  }
  /// Whether as many head tasks are a dimension of a grid of thread blocks, and a group a row of
  /// head groups.
  constexpr bool is_launchable() const {
    return tasks > 0 && tasks <= 65535 && group > 0 && group <= kMaxReplayGroup &&
           head_size <= kMaxReplayHeadSize && head_size % 4 == 0;
  }
  /// A token's key or value among all head tasks', its first dimension.
  constexpr std::int64_t vector(std::int64_t task, std::int64_t token) const {
    return (task * tokens + token) * head_size;
  }
};

/// Which queries are measured. Errors of outputs are taken on each `sample_every`-th that are
/// measured.
struct ReplayMeasured {
  const std::int32_t* index;  // [token]: which query that are measured, or -1
  int size, blocks, sample_every;
  const int2*
      named;  // [named_count]: tokens [x, y) whose recall is taken by the queries behind them
  int named_count;

  constexpr bool samples(int which) const { return which >= 0 && which % sample_every == 0; }
};

/// A block of queries, for every head task: [head task, query of the block, …], `block` of them
/// apart.
struct ReplayRows {
  int first, count, block;
  float4* e;     // [head group, token]: exponentials, the row's largest is 1; copies' lie behind
  float4* sums;  // [head group]
  float4*
      least;  // [head group]: e from which on the full row requests a token; infinite for padding
  uint4* wanted;  // [head group]: earlier tokens that it requests, where the query is that are
                  // measured

  constexpr bool is_launchable() const { return count > 0 && count <= block; }
  /// Query i of the block among all head tasks'.
  constexpr std::int64_t row(std::int64_t task, int i) const { return task * block + i; }
};

/// Rows of queries and keys that were not rounded, which caches with cache positions read.
struct ReplayCachePositionRows {
  float4* e;     // [head group, token]: as ReplayRows::e, and it where nothing is rounded; or null
  float4* most;  // [head group]: the row's largest logit
  /// [query group, pairs / 8, tile, lane of a warp]: queries before RoPE as operands of float16
  /// products; a tile is 8 columns (query, head of head groups) of the query group. Step 2 i + s
  /// has of lane l, column l / 4: pairs 16 i + 4 (l % 4) + 2 s and the next, their first elements
  /// (x), their second ones (y), and what float16 leaves of those (z, w). A query is multiplied
  /// with a power of two as keys are in replay_pair_keys().
  uint4* fragments;
  float4* scales;  // [head group]: softmax_scale, and what undoes that
};

/// What direct exponentials and outputs are made of. Angles are data: cos and sin.
struct ReplayTensors {
  const float* queries;  // [head task, token, group, dim], rotated, not rounded
  const void* keys;      // [head task, token, dim], before RoPE
  const void* values;    // [head task, token, dim]
  const float2* rope;    // [position, rotated / 2]
  const float2* coarse;  // [position / 64, pairs]: the rope table of multiples of 64
  const float2* fine;    // [64, pairs]: of positions 0 to 63, without RoPE's factor
};

/// What is read of tokens' quantized values, one copy of them all for each demotion path; copy 0
/// are the exact ones, which are not here. Whole again: rotated back.
struct ReplayCopies {
  int count;             ///< 0: no configuration is quantized
  void *keys, *values;   // [copy, part, head task, token, dim]: of shape.rounding, of shape.type
  std::int64_t vectors;  ///< elements of a part: head tasks, tokens, dim
  std::int64_t rows;  ///< float4 of a copy's exponentials: head tasks, queries, head groups, tokens
  std::int64_t terms;  ///< float32 of a copy's terms

  /// Part 0 of a copy, from 1 on; the next are `vectors` further.
  constexpr std::int64_t first_part(int copy, Type type) const {
    return std::int64_t{copy - 1} * replay_parts(type) * vectors;
  }
};

/// Tokens that enter together.
struct ReplayAppend {
  std::uint32_t first, tokens;
  bool ends_prompt = false;
};

/// A tier of a cache, and which copy its tokens are of.
struct ReplayTier {
  std::uint32_t slots, copy;
};

/// One cache.
struct ReplayRule {
  kvlab_rule rule;
  Modifiers modifiers;
  std::uint32_t evict_at;  ///< tokens are evicted when so many tokens are live; kUnlimited: never
  bool looks_back;         ///< where it matters whether a prompt segment has just ended
  bool cache_positions;    ///< live tokens are numbered by cache position
  std::uint64_t seed;
  std::uint32_t sequence, layer, kv_head;
  std::int64_t first_slot;  ///< among a head task's
  std::uint32_t slots;      ///< the most that are ever live
  std::uint32_t num_appends;
  const ReplayAppend* appends;  ///< a last one of no tokens follows
  const std::byte* params;
  const float* features;  ///< [token, those that the policy reads]
  std::uint32_t tiers,
      first_tier;          ///< how many, 0: no tier plan; the first of ReplayTierArgs::tiers
  std::uint32_t copies;    ///< bits of those that its tokens may be of
  std::int32_t fp16_copy;  ///< or -1
};

/// All caches.
struct ReplaySweep {
  const ReplayRule* rules;  // [head task, configuration]
  int configs;              ///< of a head task
  /// KV heads of a configuration whose head tasks are its own, as in the end-to-end evaluation:
  /// head task u is KV head u % config_tasks of configuration u / config_tasks, and a cache is a
  /// head task. 0: every head task goes through every configuration.
  int config_tasks;

  /// The n-th head task of a configuration.
  constexpr int task_of(int config, int n) const {
    return config_tasks ? config * config_tasks + n : n;
  }
  constexpr std::int64_t cache_of(std::int64_t task, int config) const {
    return config_tasks ? task : task * configs + config;
  }
  /// Whether a cache's tokens are of more copies than the exact one.
  constexpr bool is_quantized(std::int64_t task, int config) const {
    return rules[cache_of(task, config)].copies > 1;
  }
};

/// What a cache kept for a query.
struct ReplayKept {
  float sums[kMaxReplayGroup];  ///< of the kept exponentials
  std::uint32_t whole;          ///< everything is kept: no error
  std::uint32_t direct;         ///< direct values and changes are to be added
};

/// What the walks leave, [cache, …]. Kept sets are of each `every`-th query that are measured: all
/// of them, where there are gradients. The k-th of these is at k % capacity, and sample s that are
/// measured at s % samples.
struct ReplayKeptSets {
  int every, capacity;
  int samples;               ///< of a block of queries, at most
  ReplayKept* kept;          // [kept set]
  std::uint32_t* shared;     // [kept set, words]: bits of the tokens whose exponentials are a row's
  std::uint32_t* quantized;  // [kept set, copy from 1 on, words]: of quantized tokens; or null
  float* values;             // [sample, group, dim]: direct exponentials by values
  float* changes;            // [kept set, gradient sample, group]: direct exponentials by terms

  /// Where the kept set of query `index` that are measured is, and its sample.
  constexpr std::int64_t kept_of(std::int64_t cache, int index) const {
    return cache * capacity + index / every % capacity;
  }
  constexpr std::int64_t sample_of(const ReplayMeasured& measured, std::int64_t cache,
                                   int index) const {
    return cache * samples + index / measured.sample_every % samples;
  }
};

/// A block, and all caches that it goes through.
struct ReplayBlock {
  ReplayShape shape;
  ReplayMeasured measured;
  ReplayRows rows;
  ReplaySweep sweep;
  ReplayKeptSets sets;
};

/// Gradients of a block's queries by values.
struct ReplayTerms {
  int gradient_samples;  ///< 0: none
  int first;             ///< of the block's queries that are measured
  float* of;  // [head task, token, query, gradient sample, group], kMaxReplayQueries apart; copies'
              // lie behind
};

/// Configurations by kReplayTile of one kind of positions, -1: none; first those without
/// quantization.
struct ReplaySets {
  const std::int32_t* of;
  int tiles, quantized_tiles;

  /// Those with quantization alone.
  constexpr ReplaySets quantized_only() const {
    return {of + tiles * kReplayTile, quantized_tiles, 0};
  }
};

/// What a cache's kept set has of a full row, [cache, query of the block, head of head groups].
struct ReplayCounts {
  float* kept;          ///< sums of exponentials; negative: everything is kept
  std::uint32_t* hits;  ///< requested tokens before the query, unless everything is kept
};

// Vectors, before the first block.

/// Vectors [row, dim] before RoPE, `stride` elements apart.
struct ReplayVectors {
  const void* data;
  Type type;
  std::int64_t stride;
};

/// Rotates vectors to their positions, a row for each token.
struct ReplayRotateArgs {
  ReplayVectors from;
  const float2* rope;
  int tokens, head_size, rotated;
  Type rounding;
  int group = 1, group_head = 0;  ///< row t goes to [t, group_head] of [tokens, group, dim]
  float* plain = nullptr;         // not rounded, or null
  float* parts = nullptr;   // as replay_query_parts(), [row, 3, dim]: kept, left, kept; or null
  void* rounded = nullptr;  // of `rounding`, or null
};
cudaError_t replay_rotate(const ReplayRotateArgs& args, cudaStream_t stream);

/// A block's queries [head task, token, group, dim] in TF32, for products of float32 by tensor
/// cores: what it keeps of them, that again, and what it leaves, to [head task, query of the block,
/// group, 3, dim]. With keys in parts kept, left, kept, only the product of what both leave is
/// missing (2^-22).
cudaError_t replay_query_parts(const ReplayShape& shape, int first, int count, int block,
                               const float* queries, float* to, cudaStream_t stream);

/// Keys, a row for each token, of one head task to [token, pairs / 4, half, 4]: four pairs' first
/// elements, then their second ones, multiplied with a power of two that brings a key's largest
/// element to [2^10, 2^11). What undoes that goes to `scales` [token].
cudaError_t replay_pair_keys(const ReplayShape& shape, int tokens, const ReplayVectors& from,
                             Type type, void* to, float* scales, cudaStream_t stream);

struct ReplayDemotionPath;  // kernels/replay/copies.hpp

/// Makes all copies of keys, which `exact` are, after RoPE, or of values.
struct ReplayQuantizeArgs {
  ReplayShape shape;
  ReplayCopies copies;
  const ReplayDemotionPath*
      paths;         // [copy], or, of a configuration's own head tasks, [configuration, copy]
  int config_tasks;  ///< as ReplaySweep has it
  bool keys;
  Type type;
  const void* exact;  // [head task, token, dim]
};
cudaError_t replay_quantize(const ReplayQuantizeArgs& args, cudaStream_t stream);

// A block: its rows.

/// From products [head task, query of the block, head, token] of rotated queries and keys.
struct ReplayRowsArgs {
  ReplayShape shape;
  ReplayMeasured measured;
  ReplayRows rows;
  ReplayCachePositionRows cache_positions;
  const float* products;
  const float* unrounded;  ///< for cache_positions.e; null: that is rows.e
  const float*
      plain_queries;  // [head task, token, group, dim], before RoPE: for cache_positions.fragments
  const float2* rope;
  const void* values;
  float* outputs;  // [head task, query of the block, group, dim]: of samples, the full cache's; or
                   // null
  float4* exact_most;  // [head task, query of the block, head group]: the largest logit; or null
};
/// Bytes: products read once, rows.e (and cache_positions.e) written once, each 16 a head group and
/// token.
cudaError_t replay_rows(const ReplayRowsArgs& args, cudaStream_t stream);

/// The rows of one copy's keys, from their products, at the exact rows' scale.
cudaError_t replay_quantized_rows(const ReplayRowsArgs& args, const ReplayCopies& copies, int copy,
                                  cudaStream_t stream);

/// Causal softmax of such products, for one exact pass of attention: what a query may not see
/// becomes 0.
struct ReplaySoftmaxArgs {
  ReplayShape shape;
  int first, count, block;
  const float* products;
  Type type;
  void* to;  // as products, of `type`
};
cudaError_t replay_softmax(const ReplaySoftmaxArgs& args, cudaStream_t stream);

// Its walks.

/// Where a cache is between two blocks. All zero at first.
struct ReplayProgress {
  std::uint64_t evictions;
  std::uint32_t live, max_live, append;
  std::int32_t victim;  ///< slot + 1 of the token that evicts to the budget next; 0: not known
  std::uint32_t victim_position;
  std::uint32_t gone;  ///< where at cache positions: one past the youngest token that has left
};

/// The slots of all caches, [head task, slot of the head task].
struct ReplaySlots {
  std::int64_t of_task;  ///< how many
  int state_stride;      ///< bytes of a state, a multiple of 8
  std::byte* states;
  std::uint32_t *positions, *holes, *fillers;
  std::uint64_t* ranks;
  Observation* seen;
  float4* direct;  // [head task, plane, head group, slot]
  int planes;      ///< kReplayAhead where a cache uses cache positions, else 1
};

/// What leaves kept sets takes.
struct ReplayKeepArgs : ReplayBlock {
  ReplayTensors tensors;
  ReplayTerms terms;
  ReplayCounts counts;
  std::uint32_t* kept_bits;  // [cache, token, words]: zero before; or null
};
/// What every walk takes.
struct ReplayWalkArgs : ReplayKeepArgs {
  ReplaySlots slots;
  ReplayProgress* progress;     // [cache]
  const std::int32_t* members;  ///< configurations of one policy
  /// KV heads of a layer, where each member's keep one set together: scope=layer. Such a member's
  /// head tasks are whole layers, one after another; at most kMaxLayerHeads, sm_90. Else 0.
  int layer_heads;
  std::uint32_t max_slots;  ///< of a member
  double* sums;             // [cache, SumsShape]: of passages; null: no metrics
};
/// And where positions are cache positions.
struct ReplayCachePositionArgs : ReplayWalkArgs {
  ReplayCachePositionRows cache_positions;
  const void* paired_keys;  // [head task, token, 2 pairs] of shape.type: see replay_pair_keys()
  const float* key_scales;  // [head task, token]: what those are to be multiplied with
  std::uint32_t* positions_in_cache;  // [head task, slot of the head task]
};
/// And on tiers.
struct ReplayTierArgs : ReplayWalkArgs {
  ReplayCopies copies;
  const ReplayTier* tiers;
  int max_tiers;             ///< of a member
  std::uint8_t* slot_tiers;  // [head task, slot of the head task]
};

/// How a cache keeps tokens: at original positions in full, numbered by cache position, or on
/// tiers.
enum class ReplayTokens { exact, cache_positions, tiered };
/// What a walk is compiled for.
struct WalkVariant {
  int head_groups;
  ReplayTokens tokens;
  bool in_shared;        ///< slots lie in shared memory
  Type type;             ///< of keys and values
  bool largest = false;  ///< a group gives a token what its largest head gives: group=max
};
/// Members of one launch, whose slots may be in shared memory.
struct ReplayMembers {
  int count;
  ReplayTokens tokens;
  bool largest;
  std::size_t slot_bytes;  ///< of a state
  int max_tiers;           ///< of a tier plan; 0: none has one
};
/// How their walk is launched on the current device.
struct ReplayWalkPlan {
  WalkVariant variant;
  dim3 grid;
  unsigned threads;
  std::size_t shared_bytes, max_shared_bytes;
  int multiprocessors;
};
/// cudaErrorNotSupported: see walk_fits() of kernels/launch_plans.hpp.
cudaError_t plan_walk(const ReplayWalkArgs& args, const ReplayMembers& members,
                      ReplayWalkPlan& plan);
/// Takes the members' caches through the block of queries, by walk_caches() (walk.cuh) of their
/// policy and the plan's variant: `kernel`. `args`: of the variant's tokens,
/// ReplayCachePositionArgs or ReplayTierArgs.
cudaError_t replay_walk(const void* kernel, const ReplayWalkPlan& plan, const ReplayWalkArgs& args,
                        cudaStream_t stream);
/// Rounds that its thread blocks go in on the current device, if alone there; of a kernel that has
/// been launched.
cudaError_t replay_waves(const void* kernel, const ReplayWalkPlan& plan, int& waves);

/// What walks do, at once for all members, whose policies evict the oldest first: a query
/// attends its append's sinks and a window, so that no cache has to be walked. Uses no slots.
struct ReplayWindowsArgs : ReplayKeepArgs {
  ReplayCachePositionRows cache_positions;
  const std::int32_t* members;
  int member_count;
};
/// Bytes: rows read once for all members.
cudaError_t replay_windows(const ReplayWindowsArgs& args, cudaStream_t stream);

// And what is measured.

/// What takes kept sets, all configurations' together.
struct ReplayKeptArgs : ReplayBlock {
  const float4* cache_positions;  ///< ReplayCachePositionRows::e
  ReplaySets configs;
  ReplayCopies copies;
};
/// The outputs of the block's sampled queries in every cache: their errors beside the full cache's,
/// or, where each configuration has head tasks of its own, the outputs themselves.
struct ReplayOutputsArgs : ReplayKeptArgs {
  const void* values;
  const float* full;   ///< ReplayRowsArgs::outputs
  double2* errors;     // [cache, sample, kMaxReplayGroup]: squared: error, output
  bool stores_errors;  ///< those of each dimension, in sets.values
  void* outputs;  // [configuration, token, KV head of config_tasks, group, dim] of shape.type; or
                  // null
};
/// Bytes: values once a sampled query and 8 tiles of configurations.
cudaError_t replay_outputs(const ReplayOutputsArgs& args, cudaStream_t stream);
/// Its part of configurations with quantization, which args.configs has alone but for own head
/// tasks.
cudaError_t replay_quantized_outputs(const ReplayOutputsArgs& args, cudaStream_t stream);

/// What the block's kept sets change of the log-likelihood of the gradient samples.
struct ReplayChangesArgs : ReplayKeptArgs {
  ReplayTerms terms;
  const float*
      term_scales;  // [head task, query that are measured]: what terms are to be multiplied with
  float* changes;   // [cache, query that are measured, gradient sample]: of log-likelihood
};
/// Bytes: terms once for each 16 configurations.
cudaError_t replay_changes(const ReplayChangesArgs& args, cudaStream_t stream);

/// A block's counts and errors to metrics, in order.
struct ReplayMetricsArgs : ReplayBlock {
  int fp16_copies;  ///< the last configurations, which count nothing
  int samples;      ///< that are measured
  ReplayCounts counts;
  const double2* block_errors;  // [cache, sample, kMaxReplayGroup]
  const float* block_residual;  // [cache, sample, kReplayResiduals]: behind W_o; or null
  double* sums;                 // [cache, SumsShape]
  float* recalls;               // [cache, head, query that are measured]
  double* errors;               // [cache, sample, 2]: squared, group summed: error, output
  float* residual;              // [cache, sample, kReplayResiduals]; or null
};
cudaError_t replay_metrics(const ReplayMetricsArgs& args, cudaStream_t stream);

}  // namespace kvlab::kernels
