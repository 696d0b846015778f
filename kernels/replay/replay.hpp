// Replay on the device: many caches, each one KV head under one configuration, over the same
// queries and keys. Queries come in blocks, in order: replay_rows() makes the full cache's
// exponentials of a block, a policy's walk takes every cache through its queries and leaves what it
// kept, and replay_outputs(), replay_changes() and replay_figures() measure that, all caches'
// together.
//
// Words, each with one meaning here and in sim/device:
//
//   unit      one KV head with its group of query heads
//   quad      four query heads side by side, the last padded: a float4
//   block     queries that are taken together, at most kMostReplayQueries (CUDA's is a thread block)
//   octet     kReplayAhead queries of a block
//   cache     a unit under a configuration; numbered [unit, configuration]
//   member    a configuration that one launch of a walk takes
//   slot      where a cache has a live token, in no order
//   position  a token's number in the sequence; place: where it stands if positions are squeezed,
//             the newest one's position less the number of younger live tokens
//   row       a query's exponentials of all tokens, [quad, token], the largest of each head 1
//   shared    of all caches of a unit, as rows are (and CUDA's shared memory)
//   direct    of one cache: exponentials that it computes itself, [quad, slot]
//   old       squeezed, and has lost a younger token: what such a token is given is direct
//   span      the queries that are measured; index: which of them a query is
//   sample    each sample_every-th query of the span, whose outputs are measured
//   kept set  the tokens that a cache attends at a query, by bits
//   copy      all tokens as a ladder's rungs keep them; 0 are the exact ones
//   terms     a query's gradients by a token's value
//   twin      a configuration of the same kept sets in 16 bit, of which there are figures alone
//
// Rows, sums and outputs are float32. Shapes stand behind a field, what runs fastest last.
#pragma once

#include <cuda_runtime.h>

#include "kernels/evict/eviction.hpp"
#include "sim/metrics/sums.hpp"

namespace kvlab::kernels {

inline constexpr int kMostReplayQueries = 64;    ///< of a block
inline constexpr int kMostReplayGroup = 8;       ///< query heads of a KV head
inline constexpr int kMostReplayHeadSize = 256;  ///< a multiple of 4
inline constexpr int kReplayAhead = 8;           ///< queries of an octet
inline constexpr int kReplayGranule = 16;    ///< pairs of dimensions are padded to a multiple of it
inline constexpr int kReplayTile = 4;        ///< configurations whose outputs are one product
inline constexpr int kMostLayerHeads = 8;    ///< KV heads that may keep one set
inline constexpr int kReplayResiduals = 32;  ///< directions of the residual stream: a warp's lanes
inline constexpr int kMostReplayDraws = 64;  ///< of gradients
inline constexpr int kMostReplayRungs = 8;   ///< of a ladder
inline constexpr int kMostReplayCopies = 31;  ///< of tokens in codes
inline constexpr int kMostReplayParts = 3;    ///< of what has been read of codes

/// How many numbers of a type add up to a float32.
constexpr int replay_parts(Type type) {
  return type == KVLAB_F32 ? 1 : type == KVLAB_F16 ? 2 : kMostReplayParts;
}

constexpr dim3 grid_of(int x, int y = 1, int z = 1) {
  return {static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z)};
}

// What several kernels take.

struct ReplayShape {
  int units;  ///< that are replayed together
  int tokens, group, head_size, rotated;
  float softmax_scale;
  Type type;      ///< of keys and values
  Type rounding;  ///< of q and k after RoPE at original positions; f32: they are not rounded
  std::uint32_t threshold16;  ///< of requests

  constexpr int quads() const { return (group + 3) / 4; }
  /// Of a kept set.
  constexpr int words() const { return (tokens + 31) / 32; }
  /// Pairs of dimensions, padded. Pair p < rotated / 2 is dimensions p and p + rotated / 2, which
  /// rotate together; later ones are neighbours of the rest, which do not rotate.
  constexpr int pairs() const {
    return (head_size / 2 + kReplayGranule - 1) / kReplayGranule * kReplayGranule;
  }
  /// Whether as many units are a dimension of a grid of thread blocks, and a group a row of quads.
  constexpr bool is_launchable() const {
    return units > 0 && units <= 65535 && group > 0 && group <= kMostReplayGroup &&
           head_size <= kMostReplayHeadSize && head_size % 4 == 0;
  }
  /// A token's key or value among all units', its first dimension.
  constexpr std::int64_t vector(std::int64_t unit, std::int64_t token) const {
    return (unit * tokens + token) * head_size;
  }
};

/// Which queries are measured. Errors of outputs are taken on each `sample_every`-th of the span.
struct ReplaySpan {
  const std::int32_t* index;  // [token]: which query of the span, or -1
  int size, blocks, sample_every;
  const int2*
      named;  // [named_count]: tokens [x, y) whose recall is taken by the queries behind them
  int named_count;

  constexpr bool samples(int which) const { return which >= 0 && which % sample_every == 0; }
};

/// A block of queries, for every unit: [unit, query of the block, …], `block` of them apart.
struct ReplayRows {
  int first, count, block;
  float4* e;      // [quad, token]: exponentials, the row's largest is 1; copies' lie behind
  float4* sums;   // [quad]
  float4* least;  // [quad]: e from which on the full row requests a token; infinite for padding
  uint4* wanted;  // [quad]: earlier tokens that it requests, where the query is of the span

  constexpr bool is_launchable() const { return count > 0 && count <= block; }
  /// Query i of the block among all units'.
  constexpr std::int64_t row(std::int64_t unit, int i) const { return unit * block + i; }
};

/// Rows of queries and keys that were not rounded, which caches with squeezed positions read.
struct ReplaySqueezedRows {
  float4* e;     // [quad, token]: as ReplayRows::e, and it where nothing is rounded; or null
  float4* most;  // [quad]: the row's largest logit
  /// [octet, pairs / 8, tile, lane of a warp]: queries before RoPE as operands of float16 products;
  /// a tile is 8 columns (query, head of quads) of the octet. Step 2 i + s has of lane l, column
  /// l / 4: pairs 16 i + 4 (l % 4) + 2 s and the next, their first elements (x), their second ones
  /// (y), and what float16 leaves of those (z, w). A query is multiplied with a power of two as
  /// keys are in replay_pair_keys().
  uint4* fragments;
  float4* scales;  // [quad]: softmax_scale, and what undoes that
};

/// What direct exponentials and outputs are made of. Angles are data: cos and sin.
struct ReplayTensors {
  const float* queries;  // [unit, token, group, dim], rotated, not rounded
  const void* keys;      // [unit, token, dim], before RoPE
  const void* values;    // [unit, token, dim]
  const float2* rope;    // [position, rotated / 2]
  const float2* coarse;  // [position / 64, pairs]: the rope table of multiples of 64
  const float2* fine;    // [64, pairs]: of positions 0 to 63, without RoPE's factor
};

/// What is read of tokens' codes, one copy of them all for each way down; copy 0 are the exact
/// ones, which are not here. Whole again: behind the butterflies back.
struct ReplayCopies {
  int count;             ///< 0: no configuration has codes
  void *keys, *values;   // [copy, part, unit, token, dim]: of shape.rounding, of shape.type
  std::int64_t vectors;  ///< elements of a part: units, tokens, dim
  std::int64_t rows;     ///< float4 of a copy's exponentials: units, queries, quads, tokens
  std::int64_t terms;    ///< float32 of a copy's terms

  /// Part 0 of a copy, from 1 on; the next are `vectors` further.
  constexpr std::int64_t first_part(int copy, Type type) const {
    return std::int64_t{copy - 1} * replay_parts(type) * vectors;
  }
};

/// Tokens that enter together.
struct ReplayAdmission {
  std::uint32_t first, tokens;
  bool ends_prompt = false;
};

/// A rung of a cache, and which copy its tokens are of.
struct ReplayRung {
  std::uint32_t slots, copy;
};

/// One cache.
struct ReplayRule {
  kvlab_rule rule;
  Modifiers modifiers;
  std::uint32_t room_at;  ///< room is made when so many tokens are live; kUnlimited: never
  bool looks_back;        ///< where it matters whether a prompt segment has just ended
  bool squeezed;          ///< live tokens are numbered by age
  std::uint64_t seed;
  std::uint32_t sequence, layer, kv_head;
  std::int64_t first_slot;  ///< among a unit's
  std::uint32_t slots;      ///< the most that are ever live
  std::uint32_t admission_count;
  const ReplayAdmission* admissions;  ///< a last one of no tokens follows
  const std::byte* params;
  const float* columns;  ///< [token, those that the policy reads]
  std::uint32_t rungs,
      first_rung;        ///< how many, 0: no ladder; the first of ReplayLadderArgs::rungs
  std::uint32_t copies;  ///< bits of those that its tokens may be of
  std::int32_t twin;     ///< or -1
};

/// All caches.
struct ReplayGrid {
  const ReplayRule* rules;  // [unit, configuration]
  int configs;              ///< of a unit
  /// KV heads of a configuration whose units are its own, as in the closed loop: unit u is KV head
  /// u % config_units of configuration u / config_units, and a cache is a unit. 0: every unit goes
  /// through every configuration.
  int config_units;

  /// The n-th unit of a configuration.
  constexpr int unit_of(int config, int n) const {
    return config_units ? config * config_units + n : n;
  }
  constexpr std::int64_t cache_of(std::int64_t unit, int config) const {
    return config_units ? unit : unit * configs + config;
  }
  /// Whether a cache's tokens are of more copies than the exact one.
  constexpr bool is_coded(std::int64_t unit, int config) const {
    return rules[cache_of(unit, config)].copies > 1;
  }
};

/// What a cache kept for a query.
struct ReplayKept {
  float sums[kMostReplayGroup];  ///< of the kept exponentials
  std::uint32_t whole;           ///< everything is kept: no error
  std::uint32_t direct;          ///< direct values and changes are to be added
};

/// What the walks leave, [cache, …]. Kept sets are of each `every`-th query of the span: all of
/// them, where there are gradients. The k-th of these is at k % capacity, and sample s of the span
/// at s % samples.
struct ReplayKeptSets {
  int every, capacity;
  int samples;            ///< of a block of queries, at most
  ReplayKept* kept;       // [kept set]
  std::uint32_t* shared;  // [kept set, words]: bits of the tokens whose exponentials are a row's
  std::uint32_t* coded;   // [kept set, copy from 1 on, words]: of tokens in codes; or null
  float* values;          // [sample, group, dim]: direct exponentials by values
  float* changes;         // [kept set, draw, group]: direct exponentials by terms

  /// Where the kept set of query `index` of the span is, and its sample.
  constexpr std::int64_t kept_of(std::int64_t cache, int index) const {
    return cache * capacity + index / every % capacity;
  }
  constexpr std::int64_t sample_of(const ReplaySpan& span, std::int64_t cache, int index) const {
    return cache * samples + index / span.sample_every % samples;
  }
};

/// A block, and all caches that it goes through.
struct ReplayBlock {
  ReplayShape shape;
  ReplaySpan span;
  ReplayRows rows;
  ReplayGrid grid;
  ReplayKeptSets sets;
};

/// Gradients of a block's queries by values.
struct ReplayTerms {
  int draws;  ///< 0: none
  int first;  ///< of the block's queries of the span
  float* of;  // [unit, token, query, draw, group], kMostReplayQueries apart; copies' lie behind
};

/// Configurations by kReplayTile of one kind of positions, -1: none; first those without codes.
struct ReplaySets {
  const std::int32_t* of;
  int tiles, coded_tiles;

  /// Those with codes alone.
  constexpr ReplaySets with_codes() const { return {of + tiles * kReplayTile, coded_tiles, 0}; }
};

/// What a cache's kept set has of a full row, [cache, query of the block, head of quads].
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

/// A block's queries [unit, token, group, dim] in TF32, for products of float32 by tensor cores:
/// what it keeps of them, that again, and what it leaves, to [unit, query of the block, group, 3,
/// dim]. With keys in parts kept, left, kept, only the product of what both leave is missing
/// (2^-22).
cudaError_t replay_query_parts(const ReplayShape& shape, int first, int count, int block,
                               const float* queries, float* to, cudaStream_t stream);

/// Keys, a row for each token, of one unit to [token, pairs / 4, half, 4]: four pairs' first
/// elements, then their second ones, multiplied with a power of two that brings a key's largest
/// element to [2^10, 2^11). What undoes that goes to `scales` [token].
cudaError_t replay_pair_keys(const ReplayShape& shape, int tokens, const ReplayVectors& from,
                             Type type, void* to, float* scales, cudaStream_t stream);

struct ReplayWay;  // kernels/replay/copies.hpp

/// Makes all copies of keys, which `exact` are, after RoPE, or of values.
struct ReplayCodesArgs {
  ReplayShape shape;
  ReplayCopies copies;
  const ReplayWay* ways;  // [copy], or, of a configuration's own units, [configuration, copy]
  int config_units;       ///< as ReplayGrid has it
  bool keys;
  Type type;
  const void* exact;  // [unit, token, dim]
};
cudaError_t replay_codes(const ReplayCodesArgs& args, cudaStream_t stream);

// A block: its rows.

/// From products [unit, query of the block, head, token] of rotated queries and keys.
struct ReplayRowsArgs {
  ReplayShape shape;
  ReplaySpan span;
  ReplayRows rows;
  ReplaySqueezedRows squeezed;
  const float* products;
  const float* unrounded;      ///< for squeezed.e; null: that is rows.e
  const float* plain_queries;  // [unit, token, group, dim], before RoPE: for squeezed.fragments
  const float2* rope;
  const void* values;
  float* outputs;  // [unit, query of the block, group, dim]: of samples, the full cache's; or null
  float4* exact_most;  // [unit, query of the block, quad]: the largest logit; or null
};
/// Bytes: products read once, rows.e (and squeezed.e) written once, each 16 a quad and token.
cudaError_t replay_rows(const ReplayRowsArgs& args, cudaStream_t stream);

/// The rows of one copy's keys, from their products, at the exact rows' scale.
cudaError_t replay_coded_rows(const ReplayRowsArgs& args, const ReplayCopies& copies, int copy,
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
  std::uint32_t live, most_live, admission;
  std::int32_t victim;  ///< slot + 1 of the token that makes room next; 0: not known
  std::uint32_t victim_position;
  std::uint32_t gone;  ///< where squeezed: one past the youngest token that has left
};

/// The slots of all caches, [unit, slot of the unit].
struct ReplaySlots {
  std::int64_t of_unit;  ///< how many
  int state_stride;      ///< bytes of a state, a multiple of 8
  std::byte* states;
  std::uint32_t *positions, *holes, *fillers;
  std::uint64_t* ranks;
  Observation* seen;
  float4* direct;  // [unit, plane, quad, slot]
  int planes;      ///< kReplayAhead where a cache is squeezed, else 1
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
  /// units are whole layers, one after another; at most kMostLayerHeads, sm_90. Else 0.
  int layer_heads;
  std::uint32_t most_slots;  ///< of a member
  double* sums;              // [cache, SumsShape]: of named spans; null: no figures
};
/// And where positions are squeezed.
struct ReplaySqueezedArgs : ReplayWalkArgs {
  ReplaySqueezedRows squeezed;
  const void* paired_keys;  // [unit, token, 2 pairs] of shape.type: see replay_pair_keys()
  const float* key_scales;  // [unit, token]: what those are to be multiplied with
  std::uint32_t* places;    // [unit, slot of the unit]
};
/// And on ladders.
struct ReplayLadderArgs : ReplayWalkArgs {
  ReplayCopies copies;
  const ReplayRung* rungs;
  int most_rungs;            ///< of a member
  std::uint8_t* slot_rungs;  // [unit, slot of the unit]
};

/// How a cache keeps tokens: at original positions in full, numbered by age, or on a ladder.
enum class ReplayTokens { exact, squeezed, ladder };
/// What a walk is compiled for.
struct WalkVariant {
  int quads;
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
  int most_rungs;          ///< of a ladder; 0: none has one
};
/// How their walk is launched on the current device.
struct ReplayWalkPlan {
  WalkVariant variant;
  dim3 grid;
  unsigned threads;
  std::size_t shared_bytes, most_shared_bytes;
  int multiprocessors;
};
/// cudaErrorNotSupported: see walk_fits() of kernels/launch_plans.hpp.
cudaError_t plan_walk(const ReplayWalkArgs& args, const ReplayMembers& members,
                      ReplayWalkPlan& plan);
/// Takes the members' caches through the block of queries, by walk_caches() (walk.cuh) of their
/// policy and the plan's variant: `kernel`. `args`: of the variant's tokens, ReplaySqueezedArgs or
/// ReplayLadderArgs.
cudaError_t replay_walk(const void* kernel, const ReplayWalkPlan& plan, const ReplayWalkArgs& args,
                        cudaStream_t stream);
/// Rounds that its thread blocks go in on the current device, if alone there; of a kernel that has
/// been launched.
cudaError_t replay_waves(const void* kernel, const ReplayWalkPlan& plan, int& waves);

/// What walks do, at once for all members, whose policies evict the oldest first: a query
/// attends its admission's sinks and a window, so that no cache has to be walked. Uses no slots.
struct ReplayWindowsArgs : ReplayKeepArgs {
  ReplaySqueezedRows squeezed;
  const std::int32_t* members;
  int member_count;
};
/// Bytes: rows read once for all members.
cudaError_t replay_windows(const ReplayWindowsArgs& args, cudaStream_t stream);

// And what is measured.

/// What takes kept sets, all configurations' together.
struct ReplayKeptArgs : ReplayBlock {
  const float4* squeezed;  ///< ReplaySqueezedRows::e
  ReplaySets configs;
  ReplayCopies copies;
};
/// The outputs of the block's sampled queries in every cache: their errors beside the full cache's,
/// or, where each configuration has units of its own, the outputs themselves.
struct ReplayOutputsArgs : ReplayKeptArgs {
  const void* values;
  const float* full;   ///< ReplayRowsArgs::outputs
  double2* errors;     // [cache, sample, kMostReplayGroup]: squared: error, output
  bool leaves_errors;  ///< those of each dimension, in sets.values
  void* outputs;  // [configuration, token, KV head of config_units, group, dim] of shape.type; or
                  // null
};
/// Bytes: values once a sampled query and 8 tiles of configurations.
cudaError_t replay_outputs(const ReplayOutputsArgs& args, cudaStream_t stream);
/// Its part of configurations with codes, which args.configs has alone but for own units.
cudaError_t replay_coded_outputs(const ReplayOutputsArgs& args, cudaStream_t stream);

/// What the block's kept sets change of the log-likelihood of the draws.
struct ReplayChangesArgs : ReplayKeptArgs {
  ReplayTerms terms;
  const float* term_scales;  // [unit, query of the span]: what terms are to be multiplied with
  float* changes;            // [cache, query of the span, draw]: of log-likelihood
};
/// Bytes: terms once for each 16 configurations.
cudaError_t replay_changes(const ReplayChangesArgs& args, cudaStream_t stream);

/// A block's counts and errors to figures, in order.
struct ReplayFiguresArgs : ReplayBlock {
  int twins;    ///< the last configurations, which count nothing
  int samples;  ///< of the span
  ReplayCounts counts;
  const double2* block_errors;  // [cache, sample, kMostReplayGroup]
  const float* block_residual;  // [cache, sample, kReplayResiduals]: behind W_o; or null
  double* sums;                 // [cache, SumsShape]
  float* recalls;               // [cache, head, query of the span]
  double* errors;               // [cache, sample, 2]: squared, group summed: error, output
  float* residual;              // [cache, sample, kReplayResiduals]; or null
};
cudaError_t replay_figures(const ReplayFiguresArgs& args, cudaStream_t stream);

}  // namespace kvlab::kernels
