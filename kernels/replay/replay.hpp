// Replay on the device: many caches, each one KV head under one configuration, over the same
// queries and keys. Queries come in blocks, in order: replay_rows() makes the full cache's
// exponentials of a block, a policy's walk takes every cache through its queries and leaves what it
// kept for the sampled ones, and replay_outputs() takes their outputs, all caches' together.
//
// A unit is one KV head with its group of query heads; a quad is four query heads side by side, the
// last padded. All rows are float32.
#pragma once

#include <cuda_runtime.h>

#include "kernels/evict/eviction.hpp"
#include "sim/metrics/sums.hpp"

namespace kvlab::kernels {

inline constexpr int kMostReplayQueries = 64;    ///< of a block
inline constexpr int kMostReplayGroup = 8;       ///< query heads of a KV head
inline constexpr int kMostReplayHeadSize = 256;  ///< a multiple of 4
inline constexpr int kReplayAhead = 8;       ///< queries that a cache's own logits are computed for
inline constexpr int kReplayGranule = 16;    ///< pairs of dimensions are padded to a multiple of it
inline constexpr int kReplayTile = 4;        ///< configurations whose outputs are one product
inline constexpr int kMostLayerHeads = 8;    ///< KV heads that may keep one set
inline constexpr int kReplayResiduals = 32;  ///< directions of the residual stream: a warp's lanes
inline constexpr int kMostReplayDraws = 64;  ///< of gradients
inline constexpr int kReplayTerms = kMostReplayQueries;  ///< queries of a token's terms
inline constexpr int kMostReplayRungs = 8;               ///< of a ladder
inline constexpr int kMostReplayCopies = 31;             ///< of tokens in codes
inline constexpr int kMostReplayParts = 3;               ///< of what has been read of codes

/// How many numbers of a type add up to a float32.
constexpr int replay_parts(Type type) {
  return type == Type::f32 ? 1 : type == Type::f16 ? 2 : kMostReplayParts;
}

struct ReplayShape {
  int units;  ///< that are replayed together
  int tokens, group, head_size, rotated;
  float softmax_scale;
  Type rounding;  ///< of q and k after RoPE at original positions; f32: they are not rounded
  std::uint32_t threshold16;  ///< of requests
  constexpr int quads() const { return (group + 3) / 4; }
  /// Pairs of dimensions, padded. Pair p < rotated / 2 is dimensions p and p + rotated / 2, which
  /// rotate together; later ones are neighbours of the rest, which do not rotate.
  constexpr int pairs() const {
    return (head_size / 2 + kReplayGranule - 1) / kReplayGranule * kReplayGranule;
  }
};

/// What all queries need. Angles are data: `rope` holds cos and sin.
struct ReplayTensors {
  const float* queries;        // [unit, token, group, dim], rotated, not rounded
  Type type;                   // of keys and values
  const void* keys;            // [unit, token, dim], before RoPE
  const void* values;          // [unit, token, dim]
  const float2* rope;          // [position, rotated / 2]
  const float* plain_queries;  // [unit, token, group, dim], before RoPE; null: nobody is squeezed
  const void* paired_keys;     // [unit, token, 2 pairs] of `type`: see replay_pair_keys(); or null
  const float* key_scales;     // [unit, token]: what paired keys are to be multiplied with
  const float2* coarse;        // [position / 64, pairs]: the rope table of multiples of 64
  const float2* fine;          // [64, pairs]: of positions 0 to 63, without RoPE's factor
};

struct ReplayWay;  // kernels/replay/copies.hpp

/// What is read of tokens' codes, one copy of them all for each way down; copy 0 are the exact
/// ones, which are not here. Whole again: behind the butterflies back.
struct ReplayCopies {
  int count;              ///< 0: no configuration has codes
  void *keys, *values;    // [copy, part, unit, token, dim]: of shape.rounding, of tensors.type
  const ReplayWay* ways;  // [copy], or, of own units, [configuration, copy]
  std::int64_t vectors;   ///< elements of a part: units, tokens, dim
  std::int64_t rows;      ///< float4 of a copy's exponentials: units, queries, quads, tokens
  std::int64_t terms;     ///< float32 of a copy's terms

  /// Part 0 of a copy, from 1 on; the next are `vectors` further.
  constexpr std::int64_t first_part(int copy, Type type) const {
    return std::int64_t{copy - 1} * replay_parts(type) * vectors;
  }
};

/// Vectors [row, dim] before RoPE, `stride` elements apart.
struct ReplayVectors {
  const void* data;
  Type type;
  std::int64_t stride;
};

/// Rotates vectors to their positions: row r of `from` is of token (r % tokens).
struct ReplayRotateArgs {
  ReplayVectors from;
  const float2* rope;
  int rows, tokens, head_size, rotated;
  int group, group_head;  ///< row t goes to [t, group_head] of [tokens, group, dim]
  float* plain;           // not rounded, or null
  float* parts;           // as replay_query_parts(), [row, 3, dim]: kept, left, kept; or null
  void* rounded;          // of `rounding`, or null
  Type rounding;
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

/// Which queries are measured. Errors of outputs are taken on each `sample_every`-th of the span.
struct ReplaySpan {
  const std::int32_t* index;  // [token]: which query of the span, or -1
  int size, blocks, sample_every;
  const int2*
      named;  // [named_count]: tokens [x, y) whose recall is taken by the queries behind them
  int named_count;
};

/// A block of queries, for every unit: [unit, query of the block, …], `block` of them apart.
struct ReplayRows {
  int first, count, block;
  float4* e;         // [quad, token]: exponentials, the row's largest is 1
  float4* sums;      // [quad]
  float4* least;     // [quad]: e from which on the full row requests a token; infinite for padding
  uint4* wanted;     // [quad]: earlier tokens that it requests, where the query is of the span
  float* outputs;    // [group, dim]: of the full cache, where the query is a sample; or null
  float4* squeezed;  // [quad, token]: as e, of queries and keys that were not rounded; or null
  float4* most;      // [quad]: the largest logit of such a row
  /// [run of kReplayAhead queries, pairs / 8, tile, lane of a warp]: queries before RoPE as
  /// operands of float16 products; a tile is 8 columns (query, head of quads) of the run. Step 2 i
  /// + s has of lane l, column l / 4: pairs 16 i + 4 (l % 4) + 2 s and the next, their first
  /// elements (x), their second ones (y), and what float16 leaves of those (z, w). A query is
  /// multiplied with a power of two as keys are in replay_pair_keys().
  uint4* fragments;
  float4* scales;  // [quad]: softmax_scale, and what undoes that
  /// [quad]: the largest logit of the exact row; or null. Copies' rows lie behind `e`, at the same
  /// scale: see ReplayCopies.
  float4* exact_most;
};

/// From products [unit, query of the block, head, token] of rotated queries and keys.
struct ReplayRowsArgs {
  ReplayShape shape;
  ReplaySpan span;
  ReplayRows rows;
  const float* products;
  const float* unrounded;  ///< for rows.squeezed; null: rows.squeezed is rows.e
  ReplayTensors tensors;
};
/// Bytes: products read once, rows.e (and rows.squeezed) written once, each 16 a quad and token.
cudaError_t replay_rows(const ReplayRowsArgs& args, cudaStream_t stream);

/// The rows of one copy's keys, from their products.
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

/// Tokens that enter together.
struct ReplayAdmission {
  std::uint32_t first, tokens;
  bool ends_prompt = false;
};

/// A rung of a cache, and which copy its tokens are of.
struct ReplayRung {
  std::uint32_t slots, copy;
};

/// One configuration.
struct ReplayRule {
  PairRule rule;
  Modifiers modifiers;
  std::uint32_t room_at;  ///< room is made when so many tokens are live; kUnlimited: never
  bool looks_back;        ///< where it matters whether a prompt segment has just ended
  bool squeezed;          ///< live tokens are numbered by age
  std::uint64_t seed;
  std::int64_t first_slot;   ///< among a unit's
  std::uint32_t slots;       ///< the most that are ever live
  std::uint32_t params;      ///< bytes from ReplayArgs::params
  std::uint32_t columns;     ///< the first of ReplayArgs::columns that the policy reads
  std::uint32_t admissions;  ///< index of the first; a last one of no tokens follows
  std::uint32_t admission_count;
  std::uint32_t rungs, first_rung;  ///< how many, 0: no ladder; the first of ReplayArgs::rungs
  std::uint32_t copies;             ///< bits of those that its tokens may be of
  std::int32_t twin;  ///< the configuration of the same tokens in 16 bit, of which there are
                      ///< figures alone; or -1
};

/// Where a cache is between two blocks. All zero at first.
struct ReplayProgress {
  std::uint64_t evictions;
  std::uint32_t live, most_live, admission;
  std::int32_t victim;  ///< slot + 1 of the token that makes room next; 0: not known
  std::uint32_t victim_position;
  std::uint32_t gone;  ///< one past the youngest token that has left
};

/// All caches, [unit, slot of the unit].
struct ReplayCaches {
  std::int64_t unit_slots;
  int slot_stride;  ///< bytes of a state, a multiple of 8
  std::byte* states;
  std::uint32_t *positions, *places, *holes, *fillers;
  std::uint64_t* ranks;
  Observation* seen;
  int planes;                // of `own`: kReplayAhead where a cache is squeezed, else 1
  float4* own;               // [unit, plane, quad, slot]: exponentials of a cache's own logits
  std::uint8_t* rungs;       ///< of ladders; or null
  ReplayProgress* progress;  // [unit, configuration]
};

/// What a cache kept for a query.
struct ReplaySample {
  float sums[kMostReplayGroup];  ///< of the kept exponentials
  std::uint32_t whole;           ///< everything is kept: no error
  std::uint32_t own;             ///< ReplaySamples::own and own_changes are to be added
};

/// What the walks leave, [unit, configuration, …]. Kept sets are of each `kept_every`-th query of
/// the span: all of them, where there are gradients. The k-th of these is at k % kept_capacity, and
/// sample s of the span at s % capacity.
struct ReplaySamples {
  int kept_every, kept_capacity;
  int capacity;           ///< samples of a block of queries, at most
  int words;              ///< of a set: tokens / 32, rounded up
  std::uint32_t* shared;  // [kept, words]: bits of the tokens whose exponentials are a shared row's
  std::uint32_t* coded;   // [kept, copy from 1 on, words]: likewise of tokens in codes; or null
  ReplaySample* samples;  // [kept]
  /// [sample, group, dim]: of the others, exponentials by values. replay_outputs() leaves the
  /// errors of the outputs there, where `residual` is wanted.
  float* own;
  float* residual;  // [sample, kReplayResiduals]: those errors behind W_o; or null
  double2* errors;  // [sample, head]: squared: error, output
  int draws;        ///< of gradients; 0: none
  /// [unit, token, query, draw, group], `kReplayTerms` queries apart: the query's gradients by the
  /// token's value. The block's first query of the span is number first_term.
  const float* terms;
  int first_term;
  const float* term_scales;  // [unit, query of the span]: what terms are to be multiplied with
  float* own_changes;        // [kept, draw, group]: as `own`, by terms
  /// [configuration, token, KV head of own_units, group, dim] of tensors.type: the outputs
  /// themselves, instead of their errors; or null.
  void* outputs;
  const std::int32_t* sets;  ///< configurations by kReplayTile of one kind of positions; -1: none
  int tiles;                 ///< of them
  int coded_tiles;           ///< of those with codes, which come behind
};

struct ReplayFigures {
  double* sums;     // [unit, configuration, SumsShape]; null: no figures
  float* recalls;   // [unit, configuration, head, query of the span]
  double* errors;   // [unit, configuration, sample, 2]: squared, group summed: error, output
  float* residual;  // [unit, configuration, sample, kReplayResiduals]; or null
  float* changes;   // [unit, configuration, query of the span, draw]: of log-likelihood; or null
  std::uint32_t* kept;  // [unit, configuration, token, words]: bits, zero before; or null
  int configs, samples, words;
};

struct ReplayArgs {
  ReplayShape shape;
  ReplayTensors tensors;
  ReplaySpan span;
  ReplayRows rows;
  ReplayCaches caches;
  ReplaySamples samples;
  ReplayFigures figures;
  /// [configuration], or, where budgets differ by head, [layer, KV head, configuration]: see
  /// rule_of().
  const ReplayRule* rules;
  int rule_configs, rule_heads;  ///< how many configurations, and KV heads of a layer; 0: alike
  const ReplayAdmission* admissions;
  const std::byte* params;
  const std::int32_t* members;  ///< configurations of this policy
  int member_count;
  std::size_t slot_bytes;  ///< of its state
  bool squeezed;           ///< all members are, or none
  bool largest;            ///< their groups give a token what the largest head gives: group=max
  /// KV heads of a layer, where each member's keep one set together: scope=layer. Such a member's
  /// units are whole layers, one after another; at most kMostLayerHeads, sm_90. Else 0.
  int layer_heads;
  std::uint32_t room_slots;  ///< the most slots of a member; what fits is kept in shared memory
  float4* windows;  ///< [unit, member, query of the block, head (of quads)]: for replay_windows()
  /// What tokens bring: column_count a token, [unit, …]. A policy's own lie together, [token, its
  /// columns], behind those of all tokens that come before them in the count.
  const float* columns;
  std::uint32_t column_count;
  std::uint32_t sequence;
  const std::uint32_t *layers, *kv_heads;  // [unit]
  /// KV heads of a configuration whose units are its own, as in the closed loop: unit u is KV head
  /// u % own_units of configuration u / own_units, and all that is counted by unit and
  /// configuration has one configuration. 0: every unit goes through every configuration.
  int own_units;
  ReplayCopies copies;
  const ReplayRung* rungs;
  int most_rungs;  ///< of a member; 0: none has a ladder, else all have

  /// Units that each configuration goes through.
  constexpr int units_of_config() const { return own_units ? own_units : shape.units; }
  /// The n-th of them.
  constexpr int unit_of(int config, int n) const { return own_units ? config * own_units + n : n; }
  /// A configuration on a unit.
  constexpr const ReplayRule& rule_of(int unit, int config) const {
    const std::int64_t head =
        rule_heads ? std::int64_t{layers[unit]} * rule_heads + kv_heads[unit] : 0;
    return rules[head * rule_configs + config];
  }
  /// Likewise, among all figures.
  constexpr std::int64_t figure_of(int unit, int config) const {
    return own_units ? std::int64_t{unit} : std::int64_t{unit} * figures.configs + config;
  }
  /// Where a figure's kept set of query `index` of the span is, and its sample.
  constexpr std::int64_t kept_of(std::int64_t figure, int index) const {
    return figure * samples.kept_capacity + index / samples.kept_every % samples.kept_capacity;
  }
  constexpr std::int64_t sample_of(std::int64_t figure, int index) const {
    return figure * samples.capacity + index / span.sample_every % samples.capacity;
  }
};

/// Which of a policy's walks: what it is compiled for.
struct WalkVariant {
  int quads;
  bool squeezed, in_room;  ///< in_room: slots lie in shared memory
  Type type;               ///< of keys and values
  bool largest = false;    ///< as ReplayArgs::largest
  bool rungs = false;      ///< of ladders
};
/// The walk that the members' caches need on the current device.
cudaError_t walk_variant(const ReplayArgs& args, WalkVariant& variant);

/// Takes the members' caches through the block of queries, by walk_caches() (walk.cuh) of their
/// policy and variant: `kernel`.
cudaError_t replay_walk(const void* kernel, const ReplayArgs& args, cudaStream_t stream);
/// Rounds that its thread blocks go in on the current device, if alone there.
cudaError_t replay_waves(const void* kernel, const ReplayArgs& args, int& waves);

/// What walks do, at once for all members, whose policies evict the oldest first: a query
/// attends its admission's sinks and a window, so that no cache has to be walked. Uses no slots.
/// Bytes: rows read once for all members.
cudaError_t replay_windows(const ReplayArgs& args, cudaStream_t stream);

/// The outputs of the block's sampled queries in every cache to args.samples: their errors beside
/// the full cache's, or, where each configuration has units of its own, the outputs themselves.
/// Bytes: values once a sampled query and 8 tiles of configurations.
cudaError_t replay_outputs(const ReplayArgs& args, cudaStream_t stream);
/// Its part of configurations with codes, which `args` has alone but for own units.
cudaError_t replay_coded_outputs(const ReplayArgs& args, cudaStream_t stream);
/// What the block's kept sets change of the log-likelihood of the draws, to args.figures.changes.
/// Bytes: terms once for each 16 configurations.
cudaError_t replay_changes(const ReplayArgs& args, cudaStream_t stream);
/// From args.samples to args.figures.
cudaError_t replay_errors(const ReplayArgs& args, cudaStream_t stream);

}  // namespace kvlab::kernels
