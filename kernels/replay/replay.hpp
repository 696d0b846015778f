// Replay on the device. It processes many caches over the same queries and keys; a cache is one KV
// head under one configuration. Queries come in blocks, in order. replay_rows() computes the full
// cache's exponentials for the queries of a block. The walk of a policy then processes these
// queries in order in every cache, and stores which tokens the cache kept. replay_outputs(),
// replay_changes() and replay_metrics() then measure all caches together.
//
// Words, each with one meaning here and in sim/device:
//
//   head task   one KV head with its group of query heads
//   head group  four query heads in the components of a float4; padded if the group has fewer
//   block       queries that are processed together, at most kMaxReplayQueries (CUDA's blocks are
//               called thread blocks)
//   query group kReplayAhead consecutive queries of a block
//   cache       a head task under a configuration; numbered [head task, configuration]
//   member      a configuration that one launch of a walk handles
//   slot        memory of a cache for one live token; tokens are in any order
//   position    a token's index in the sequence
//   cache position   with cache positions: the newest token's position minus the number of younger
//               live tokens
//   row         a query's exponentials of all tokens, [head group, token]; each head's largest is 1
//   shared      used by all caches of a head task, as rows are (also CUDA's shared memory)
//   direct      exponentials that one cache computes itself because no row has them, [head group,
//               slot]
//   old         with cache positions: a token that is older than an evicted token, so its distance
//               to the query is not that of the row, and its exponentials are direct
//   measured    the queries that metrics cover; index: a query's number among them
//   sample      every sample_every-th measured query, whose outputs are measured
//   kept set    the tokens that a cache attends to at a query, as bits
//   copy        all tokens as they are after one demotion path, dequantized; copy 0 holds the exact
//               tokens
//   terms       a query's gradients times a token's value
//   fp16 copy   of a quantized configuration: a second one that keeps the same tokens in 16 bits.
//               It has metrics, but no slots
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
/// Numbers of pairs of dimensions are rounded up to a multiple of it.
inline constexpr int kReplayGranule = 16;
inline constexpr int kReplayTile = 4;  ///< configurations whose outputs are computed in one product
inline constexpr int kMaxLayerHeads =
    8;  ///< KV heads of a layer that can share one set of kept tokens (scope=layer)
/// Directions of the residual stream, one per lane of a warp
inline constexpr int kReplayResiduals = 32;
inline constexpr int kMaxReplayGradientSamples = 64;  ///< gradient samples
inline constexpr int kMaxReplayTiers = 8;             ///< tiers of a tier plan
inline constexpr int kMaxReplayCopies = 31;           ///< copies of quantized tokens
inline constexpr int kMaxReplayParts =
    3;  ///< maximum number of elements whose sum represents a dequantized number

/// The number of elements of a type whose sum can represent a float32.
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
  Type type;      ///< type of keys and values
  Type rounding;  ///< type to which q and k are rounded after RoPE at original positions; f32: they
                  ///< are not rounded
  std::uint32_t threshold16;  ///< request threshold, in units of 2^-16

  constexpr int head_groups() const { return (group + 3) / 4; }
  /// 32-bit words of a kept set.
  constexpr int words() const { return (tokens + 31) / 32; }
  /// Number of pairs of dimensions, with padding. Pair p < rotated / 2 consists of dimensions p and
  /// p + rotated / 2, which rotate together. Later pairs consist of two neighbouring dimensions
  /// that RoPE does not rotate.
  constexpr int pairs() const {
    return (head_size / 2 + kReplayGranule - 1) / kReplayGranule * kReplayGranule;
  }
  /// Whether the kernels support the shape: the number of head tasks must fit in a CUDA grid, and
  /// group and head size have limits.
  constexpr bool is_launchable() const {
    return tasks > 0 && tasks <= 65535 && group > 0 && group <= kMaxReplayGroup &&
           head_size <= kMaxReplayHeadSize && head_size % 4 == 0;
  }
  /// Index of the first element of a token's key or value in an array over all head tasks.
  constexpr std::int64_t vector(std::int64_t task, std::int64_t token) const {
    return (task * tokens + token) * head_size;
  }
};

/// The queries that are measured. Outputs are compared only at every `sample_every`-th measured
/// query.
struct ReplayMeasured {
  const std::int32_t* index;  // [token]: the query's index among measured queries, or -1
  int size, blocks, sample_every;
  const int2* named;  // [named_count]: the passages [x, y). The recall of a passage's tokens is
                      // measured at the queries after the passage.
  int named_count;

  constexpr bool samples(int which) const { return which >= 0 && which % sample_every == 0; }
};

/// The rows of a block of queries, for every head task: [head task, query of the block, …].
/// Consecutive head tasks are `block` queries apart.
struct ReplayRows {
  int first, count, block;
  float4* e;  // [head group, token]: exponentials, scaled so that a row's largest is 1. The rows of
              // the copies follow.
  float4* sums;               // [head group]
  float4* request_threshold;  // [head group]: the lowest exponential at which the full row requests
                              // a token; infinite for padding
  uint4* wanted;  // [head group]: number of earlier tokens that the query requests; only for
                  // measured queries

  constexpr bool is_launchable() const { return count > 0 && count <= block; }
  /// The index of query i of the block among all head tasks.
  constexpr std::int64_t row(std::int64_t task, int i) const { return task * block + i; }
};

/// Rows of queries and keys that were not rounded, for caches with cache positions.
struct ReplayCachePositionRows {
  // [head group, token]: like ReplayRows::e, but from vectors that were not rounded. If nothing is
  // rounded, it is ReplayRows::e itself. Null if no cache uses cache positions.
  float4* e;
  float4* max_logits;  // [head group]: the row's largest logit
  /// [query group, pairs / 8, tile, lane of a warp]: queries before RoPE as operands of float16
  /// products. A tile is 8 columns of the query group; a column is a query and one of its heads.
  /// The second index is the step of the product. In step 2 i + s (s: 0 or 1), lane l has column l
  /// / 4 and two pairs: pair 16 i + 4 (l % 4) + 2 s and the next one. Its uint4 contains the first
  /// elements of the two pairs (x), their second elements (y), and the float16 rounding errors of x
  /// and of y (z, w). A query is multiplied by a power of two, as keys are in replay_pair_keys().
  uint4* fragments;
  /// [head group]: softmax_scale divided by the power of two by which the query was multiplied.
  float4* scales;
};

/// The tensors from which direct exponentials and attention outputs are computed. Rotation angles
/// are given as cos and sin.
struct ReplayTensors {
  const float* queries;  // [head task, token, group, dim], rotated, not rounded
  const void* keys;      // [head task, token, dim], before RoPE
  const void* values;    // [head task, token, dim]
  const float2* rope;    // [position, rotated / 2]
  const float2* coarse;  // [position / 64, pairs]: rope table of positions that are multiples of 64
  const float2* fine;    // [64, pairs]: rope table of positions 0 to 63, without RoPE's scaling
                         // factor, which `coarse` contains
};

/// Dequantized tokens, after the inverse Hadamard rotation. There is one copy of all tokens for
/// each demotion path. Copy 0, the exact tokens, is not stored here.
struct ReplayCopies {
  int count;  ///< 0: no configuration is quantized
  // [copy, part, head task, token, dim]: keys of shape.rounding, values of shape.type
  void *keys, *values;
  std::int64_t vectors;  ///< elements of a part: head tasks * tokens * dim
  /// Number of float4 of a copy's exponentials: head tasks * queries * head groups * tokens
  std::int64_t rows;
  std::int64_t terms;  ///< number of float32 that the terms of a copy take

  /// Offset of part 0 of a copy (copy 1 or a later one), in elements. Each further part begins
  /// `vectors` elements later.
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
  std::uint32_t evict_at;  ///< number of live tokens at which eviction begins; kUnlimited: never
  bool looks_back;  ///< whether the rule depends on whether the last append ended a prompt segment
  bool cache_positions;  ///< tokens have cache positions instead of original positions
  std::uint64_t seed;
  std::uint32_t sequence, layer, kv_head;
  std::int64_t first_slot;  ///< index among the head task's slots
  std::uint32_t slots;      ///< maximum number of tokens that are live at once
  std::uint32_t num_appends;
  const ReplayAppend* appends;  ///< [num_appends + 1]; the last one has no tokens
  const std::byte* params;
  const float* features;  ///< [token, features that the policy reads]
  std::uint32_t tiers,
      first_tier;          ///< number of tiers (0: no tier plan), and index of the first tier in
                           ///< ReplayTierArgs::tiers
  std::uint32_t copies;    ///< a bit for each copy that the cache's tokens may belong to
  std::int32_t fp16_copy;  ///< index of the fp16 copy, or -1
};

/// All caches.
struct ReplaySweep {
  const ReplayRule* rules;  // [head task, configuration]
  int configs;              ///< configurations per head task
  /// In an offline replay, 0: every head task has one cache for each configuration. In the
  /// end-to-end evaluation, each configuration has separate head tasks, and each head task is one
  /// cache. Then this is the number of head tasks of a configuration: head task u is KV head u %
  /// config_tasks of configuration u / config_tasks.
  int config_tasks;

  /// The n-th head task of a configuration.
  constexpr int task_of(int config, int n) const {
    return config_tasks ? config * config_tasks + n : n;
  }
  constexpr std::int64_t cache_of(std::int64_t task, int config) const {
    return config_tasks ? task : task * configs + config;
  }
  /// Whether a cache's tokens may belong to copies other than the exact one.
  constexpr bool is_quantized(std::int64_t task, int config) const {
    return rules[cache_of(task, config)].copies > 1;
  }
};

/// The sums over the tokens that a cache keeps at one query.
struct ReplayKept {
  float sums[kMaxReplayGroup];  ///< sums of the kept exponentials
  std::uint32_t whole;          ///< nonzero if all tokens are kept, which causes no error
  std::uint32_t direct;         ///< nonzero if some kept exponentials are direct, so that the sums
                                ///< in ReplayKeptSets::values and changes must be added
};

/// The output of the walks, [cache, …]. Kept sets are stored for every `every`-th measured query,
/// or for all measured queries if there are gradients. The k-th kept set is stored at k % capacity,
/// and the s-th sample at s % samples.
struct ReplayKeptSets {
  int every, capacity;
  int samples;       ///< maximum number of samples in a block of queries
  ReplayKept* kept;  // [kept set]
  std::uint32_t*
      shared;  // [kept set, words]: bits of the kept tokens whose exponentials are those of the row
  std::uint32_t* quantized;  // [kept set, copy from 1 on, words]: bits of the kept tokens of each
                             // copy; may be null
  float* values;             // [sample, group, dim]: direct exponentials times values
  float* changes;            // [kept set, gradient sample, group]: direct exponentials times terms

  /// The index of the kept set for measured query `index`. sample_of() does the same for samples.
  constexpr std::int64_t kept_of(std::int64_t cache, int index) const {
    return cache * capacity + index / every % capacity;
  }
  constexpr std::int64_t sample_of(const ReplayMeasured& measured, std::int64_t cache,
                                   int index) const {
    return cache * samples + index / measured.sample_every % samples;
  }
};

/// A block of queries, and all caches that process it.
struct ReplayBlock {
  ReplayShape shape;
  ReplayMeasured measured;
  ReplayRows rows;
  ReplaySweep sweep;
  ReplayKeptSets sets;
};

/// Terms: the gradients of a block's queries times the values.
struct ReplayTerms {
  int gradient_samples;  ///< 0: none
  int first;             ///< index of the block's first measured query
  float* data;  // [head task, token, query, gradient sample, group]; tokens are kMaxReplayQueries
                // queries apart. The terms of the copies follow.
};

/// Indices of configurations, in tiles of kReplayTile configurations that have the same kind of
/// positions. The unused indices of a tile are -1. Tiles without quantization come first.
struct ReplaySets {
  const std::int32_t* indices;
  int tiles, quantized_tiles;

  /// The tiles whose configurations are quantized.
  constexpr ReplaySets quantized_only() const {
    return {indices + tiles * kReplayTile, quantized_tiles, 0};
  }
};

/// The share of a full row that a cache keeps, [cache, query of the block, head of head groups].
struct ReplayCounts {
  float* kept;          // sums of kept exponentials
  std::uint32_t* hits;  // requested tokens before the query that are kept; not set if all are live
  std::uint32_t* live;  // [cache, query of the block]: number of live tokens; query + 1: all
};

// The next functions prepare the vectors that the kernels of a block read: they rotate, rearrange
// and quantize them.

/// Vectors [row, dim] before RoPE, `stride` elements apart.
struct ReplayVectors {
  const void* data;
  Type type;
  std::int64_t stride;
};

/// Rotates vectors to their positions. There is one row per token.
struct ReplayRotateArgs {
  ReplayVectors from;
  const float2* rope;
  int tokens, head_size, rotated;
  Type rounding;
  int group = 1, group_head = 0;  ///< row t is written to [t, group_head] of [tokens, group, dim]
  float* plain = nullptr;         // result without rounding, or null
  float* parts = nullptr;         // [row, 3, dim], or null: the result split into TF32 parts for
                                  // replay_query_parts(): rounded part, rest, rounded part
  void* rounded = nullptr;        // result in type `rounding`, or null
};
cudaError_t replay_rotate(const ReplayRotateArgs& args, cudaStream_t stream);

/// Splits a block's queries [head task, token, group, dim] into TF32 parts, so that tensor cores
/// can compute float32 products. Writes the rounded part, the rounded part again, and the rest, to
/// [head task, query of the block, group, 3, dim]. Keys are split into rounded part, rest, rounded
/// part. So the sum of the three products only lacks the product of the two rests, which is about
/// 2^-22 of the result.
cudaError_t replay_query_parts(const ReplayShape& shape, int first, int count, int block,
                               const float* queries, float* to, cudaStream_t stream);

/// Arranges the keys of one head task, one row per token, as [token, pairs / 4, half, 4]: the first
/// elements of four pairs, then their second elements. Each key is multiplied by a power of two
/// that scales its largest element to [2^10, 2^11). The inverse factor is stored in `scales`
/// [token].
cudaError_t replay_pair_keys(const ReplayShape& shape, int tokens, const ReplayVectors& from,
                             Type type, void* to, float* scales, cudaStream_t stream);

struct ReplayDemotionPath;  // kernels/replay/copies.hpp

/// Makes all copies of keys (after RoPE) or of values from the exact tokens.
struct ReplayQuantizeArgs {
  ReplayShape shape;
  ReplayCopies copies;
  const ReplayDemotionPath*
      paths;         // [copy] or, if configurations have separate head tasks, [configuration, copy]
  int config_tasks;  ///< see ReplaySweep
  bool keys;
  Type type;
  const void* exact;  // [head task, token, dim]
};
cudaError_t replay_quantize(const ReplayQuantizeArgs& args, cudaStream_t stream);

// The rows of a block.

/// The inputs are the products [head task, query of the block, head, token] of rotated queries and
/// keys.
struct ReplayRowsArgs {
  ReplayShape shape;
  ReplayMeasured measured;
  ReplayRows rows;
  ReplayCachePositionRows cache_positions;
  const float* products;
  const float* unrounded;  ///< products of vectors that were not rounded, for cache_positions.e;
                           ///< null if cache_positions.e is rows.e
  const float* plain_queries;  // [head task, token, group, dim], before RoPE; input of
                               // cache_positions.fragments
  const float2* rope;
  const void* values;
  float* outputs;     // [head task, query of the block, group, dim]: the full cache's outputs of
                      // samples; may be null
  float4* exact_max;  // [head task, query of the block, head group]: the largest logit; may be null
};
/// Memory traffic: products are read once; rows.e (and cache_positions.e) is written once, 16 bytes
/// per head group and token.
cudaError_t replay_rows(const ReplayRowsArgs& args, cudaStream_t stream);

/// Computes the rows of one copy from args.products, the products of the queries and the copy's
/// keys. The exponents subtract the maxima of the exact rows, so exponentials of all copies have
/// the same scale.
cudaError_t replay_quantized_rows(const ReplayRowsArgs& args, const ReplayCopies& copies, int copy,
                                  cudaStream_t stream);

/// The causal softmax of the products, for one exact pass of attention. The results for tokens that
/// a query may not see are 0.
struct ReplaySoftmaxArgs {
  ReplayShape shape;
  int first, count, block;
  const float* products;
  Type type;
  void* to;  // like products, of type `type`
};
cudaError_t replay_softmax(const ReplaySoftmaxArgs& args, cudaStream_t stream);

// The walks of a block.

/// The state of a cache between two blocks. All fields are zero at first.
struct ReplayProgress {
  std::uint64_t evictions;
  std::uint32_t live, max_live, append;
  std::int32_t victim;  ///< slot + 1 of the token that is evicted next; 0 if not known
  std::uint32_t victim_position;
  std::uint32_t
      gone;  ///< with cache positions: one past the position of the youngest evicted token
};

/// The slots of all caches, [head task, slot of the head task].
struct ReplaySlots {
  std::int64_t task_stride;  ///< slots per head task
  int state_stride;          ///< bytes of a state; a multiple of 8
  std::byte* states;
  std::uint32_t *positions, *holes, *fillers;
  std::uint64_t* ranks;
  Observation* seen;
  float4* direct;  // [head task, plane, head group, slot]
  int planes;      ///< number of queries whose direct exponentials are stored at the same time:
                   ///< kReplayAhead if a cache uses cache positions, otherwise 1
};

/// Arguments of a kernel that stores kept sets.
struct ReplayKeepArgs : ReplayBlock {
  ReplayTensors tensors;
  ReplayTerms terms;
  ReplayCounts counts;
  std::uint32_t* kept_bits;  // [cache, token, words]: zero before the first block; or null
};
/// Arguments of all walks.
struct ReplayWalkArgs : ReplayKeepArgs {
  ReplaySlots slots;
  ReplayProgress* progress;     // [cache]
  const std::int32_t* members;  ///< configurations that have the same policy
  /// The number of KV heads of a layer, at most kMaxLayerHeads, if the members have scope=layer
  /// (all heads of a layer keep the same tokens); otherwise 0. scope=layer requires sm_90, and a
  /// member's head tasks must be whole layers, one after another.
  int layer_heads;
  std::uint32_t max_slots;  ///< maximum over the members
  double* sums;             // [cache, SumsShape]: sums for passages; null if there are no metrics
};
/// Additional arguments for cache positions.
struct ReplayCachePositionArgs : ReplayWalkArgs {
  ReplayCachePositionRows cache_positions;
  const void* paired_keys;  // [head task, token, 2 pairs] of shape.type, as replay_pair_keys()
                            // arranges them
  const float* key_scales;  // [head task, token]: factors for paired_keys
  std::uint32_t* positions_in_cache;  // [head task, slot of the head task]
};
/// Additional arguments for tiers.
struct ReplayTierArgs : ReplayWalkArgs {
  ReplayCopies copies;
  const ReplayTier* tiers;
  int max_tiers;             ///< maximum over the members
  std::uint8_t* slot_tiers;  // [head task, slot of the head task]
};

/// How a cache stores tokens: exact at original positions, numbered by cache position, or on tiers.
enum class ReplayTokens { exact, cache_positions, tiered };
/// The parameters that a walk is compiled for.
struct WalkVariant {
  int head_groups;
  ReplayTokens tokens;
  bool in_shared;        ///< slots are in shared memory
  Type type;             ///< of keys and values
  bool largest = false;  ///< a group gives a token the mass of its largest head (group=max)
};
/// The members of one launch.
struct ReplayMembers {
  int count;
  ReplayTokens tokens;
  bool largest;
  std::size_t slot_bytes;  ///< bytes of a state
  int max_tiers;           ///< maximum number of tiers of a member; 0: no member has a tier plan
};
/// How to launch the members' walk on the current device.
struct ReplayWalkPlan {
  WalkVariant variant;
  dim3 grid;
  unsigned threads;
  std::size_t shared_bytes, max_shared_bytes;
  int multiprocessors;
};
/// Returns cudaErrorNotSupported if walk_fits() (kernels/launch_plans.hpp) returns false.
cudaError_t plan_walk(const ReplayWalkArgs& args, const ReplayMembers& members,
                      ReplayWalkPlan& plan);
/// Processes the block of queries in the members' caches. `kernel` is walk_caches() (walk.cuh),
/// compiled for their policy and the plan's variant. The type of `args` depends on the variant's
/// tokens: ReplayWalkArgs, ReplayCachePositionArgs or ReplayTierArgs.
cudaError_t replay_walk(const void* kernel, const ReplayWalkPlan& plan, const ReplayWalkArgs& args,
                        cudaStream_t stream);
/// The number of waves in which the kernel's thread blocks run on the current device, if no other
/// kernel runs there. The kernel must have been launched before.
cudaError_t replay_waves(const void* kernel, const ReplayWalkPlan& plan, int& waves);

/// Computes the results of the walks for all members at once, for policies that evict the oldest
/// token first. Under such a policy, a query attends to the sinks and to a window. So the kept
/// tokens follow from the query's position alone, and no slots are needed.
struct ReplayWindowsArgs : ReplayKeepArgs {
  ReplayCachePositionRows cache_positions;
  const std::int32_t* members;
  int member_count;
};
/// Memory traffic: rows are read once for all members.
cudaError_t replay_windows(const ReplayWindowsArgs& args, cudaStream_t stream);

// The measurements of a block.

/// Arguments of a kernel that reads the kept sets of all configurations.
struct ReplayKeptArgs : ReplayBlock {
  const float4* cache_positions;  ///< see ReplayCachePositionRows::e
  ReplaySets configs;
  ReplayCopies copies;
};
/// Computes the outputs of the block's sampled queries in every cache. Stores their errors relative
/// to the full cache's outputs or, if configurations have separate head tasks, the outputs
/// themselves.
struct ReplayOutputsArgs : ReplayKeptArgs {
  const void* values;
  const float* full;   ///< ReplayRowsArgs::outputs
  double2* errors;     // [cache, sample, kMaxReplayGroup]: squared error, squared output
  bool stores_errors;  ///< whether the errors of each dimension are stored in sets.values
  void* outputs;  // [configuration, token, KV head of config_tasks, group, dim] of shape.type; or
                  // null
};
/// Memory traffic: for each sampled query, values are read once per kTilesAtOnce tiles
/// (outputs.cu). A tile is kReplayTile configurations and one head group.
cudaError_t replay_outputs(const ReplayOutputsArgs& args, cudaStream_t stream);
/// The part of replay_outputs() for quantized configurations. Unless configurations have separate
/// head tasks, args.configs contains only quantized configurations.
cudaError_t replay_quantized_outputs(const ReplayOutputsArgs& args, cudaStream_t stream);

/// Computes how the block's kept sets change the log-likelihood of the gradient samples.
struct ReplayChangesArgs : ReplayKeptArgs {
  ReplayTerms terms;
  const float* term_scales;  // [head task, measured query]: factors for terms
  float* changes;  // [cache, measured query, gradient sample]: change of the log-likelihood
};
/// Memory traffic: terms are read once per 16 configurations.
cudaError_t replay_changes(const ReplayChangesArgs& args, cudaStream_t stream);

/// Adds a block's counts and errors to the metrics, in the order of the queries.
struct ReplayMetricsArgs : ReplayBlock {
  int fp16_copies;  ///< the last `fp16_copies` configurations are fp16 copies, which add no counts
  int samples;      ///< number of measured samples
  ReplayCounts counts;
  const double2* block_errors;  // [cache, sample, kMaxReplayGroup]
  // [cache, sample, kReplayResiduals]: errors multiplied by W_o; may be null
  const float* block_residual;
  double* sums;     // [cache, SumsShape]
  float* recalls;   // [cache, head, measured query]
  double* errors;   // [cache, sample, 2]: squared error and squared output, summed over the group
  float* residual;  // [cache, sample, kReplayResiduals]; may be null
};
cudaError_t replay_metrics(const ReplayMetricsArgs& args, cudaStream_t stream);

}  // namespace kvlab::kernels
