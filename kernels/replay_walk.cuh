// One policy's caches through a block of queries: a thread block for each cache (unit and
// configuration), which takes the queries in order. A thread has every 256th slot.
//
// Bytes: for each live token and query 16 a quad, its exponentials (from the L2 cache: the caches
// of a unit read the same rows), and the values of what is kept for each sampled query. States
// stay in shared memory through the block, where they fit.
#pragma once

#include <algorithm>

#include "kernels/device/element.cuh"
#include "kernels/device/fold.cuh"
#include "kernels/device/leaving.cuh"
#include "kernels/device/mass_sum.hpp"
#include "kernels/device/select_leaving.cuh"
#include "kernels/replay.hpp"
#include "policies/bytes.hpp"

namespace kvlab::kernels {

inline constexpr int kReplayThreads = 256;
inline constexpr int kReplayWarps = kReplayThreads / kWarpSize;
inline constexpr int kReplayDims = 4 * kWarpSize;  ///< of a value that a warp takes at once
/// Below this sum, exponentials taken with the maximum of a larger row have lost bits.
inline constexpr float kLostSum = 0x1p-60f;

struct ReplayShared {
  union {
    SelectionShared selection;
    float queries[kMostReplayGroup][kMostReplayHeadSize];
    float output[kMostReplayGroup][kMostReplayHeadSize];
  };
  double errors[kMostReplayGroup][2];
  float folded[2][kReplayWarps][24];  // by parity: sums, hits (bits), maxima
  Leaving leaving[kReplayWarps];
  std::uint32_t moves;
  float recall[kMostReplayQueries][kMostReplayGroup], nll[kMostReplayQueries][kMostReplayGroup];
  std::uint32_t missed[kMostReplayQueries][kMostReplayGroup];
};

/// Bytes of shared memory for the slots of a cache: positions, places, states.
constexpr std::size_t replay_room(std::uint32_t slots, std::size_t slot_bytes) {
  return (std::size_t{slots} * (2 * sizeof(std::uint32_t) + slot_bytes) + 15) / 16 * 16;
}

template <class P, int kQuads>
class ReplayWalk {
  using Slot = typename P::Slot;
  static constexpr int kHeads = 4 * kQuads;
  static constexpr int kHeld = kQuads == 1 ? 8 : 4;  ///< slots of a thread held in registers
  static constexpr bool kAsks = P::kInfo.needs == Needs::requests;
  struct Quads {
    float4 quad[kQuads];
  };
  struct Totals {
    float4 sum[kQuads], most[kQuads];
    uint4 hits[kQuads];
  };

 public:
  __device__ ReplayWalk(const ReplayArgs& args, ReplayShared& shared, std::byte* room)
      : args_(args),
        shared_(shared),
        unit_(static_cast<int>(blockIdx.y)),
        config_(args.members[blockIdx.x]),
        rule_(args.rules[config_]),
        guards_{.sinks = rule_.rule.sinks, .recent = rule_.rule.recent},
        thread_(threadIdx.x),
        base_(unit_ * args.caches.unit_slots + rule_.first_slot) {
    if constexpr (!std::is_empty_v<typename P::Params>)
      params_ = *reinterpret_cast<const typename P::Params*>(args.params + rule_.params);
    const ReplayCaches& caches = args.caches;
    positions_ = caches.positions + base_;
    places_ = caches.places + base_;
    states_ = reinterpret_cast<Slot*>(caches.states + base_ * caches.slot_stride);
    progress_ = progress();
    if (room) move_in(room);
  }

  __device__ void run() {
    for (int i = 0; i < args_.rows.count; ++i) step(i);
    __syncthreads();
    sum_figures();
    move_out();
    if (thread_ == 0) progress() = progress_;
  }

 private:
  __device__ ReplayProgress& progress() const {
    return args_.caches.progress[std::int64_t{unit_} * args_.figures.configs + config_];
  }
  __device__ std::int64_t figure() const {
    return std::int64_t{unit_} * args_.figures.configs + config_;
  }
  /// Of this unit and query of the block.
  __device__ std::int64_t row(int i) const { return std::int64_t{unit_} * args_.rows.block + i; }
  __device__ const ReplayAdmission& admission(int ahead = 0) const {
    return args_.admissions[rule_.admissions + progress_.admission + ahead];
  }
  __device__ Step step_at(std::uint32_t now, std::uint32_t queries) const {
    return {.now = now,
            .budget = rule_.rule.budget,
            .live = progress_.live,
            .queries = queries,
            .seed = rule_.seed,
            .sequence = args_.sequence,
            .layer = args_.layers[unit_],
            .kv_head = args_.kv_heads[unit_]};
  }
  __device__ std::uint32_t surplus() const {
    const std::uint32_t budget = rule_.rule.budget;
    return budget == kUnlimited || progress_.live < budget ? 0 : progress_.live - (budget - 1);
  }

  __device__ void move_in(std::byte* room) {
    auto* const states = reinterpret_cast<Slot*>(room);
    auto* const positions = reinterpret_cast<std::uint32_t*>(
        room + std::size_t{args_.room_slots} * (std::is_empty_v<Slot> ? 0 : sizeof(Slot)));
    auto* const places = positions + args_.room_slots;
    for (std::uint32_t i = thread_; i < progress_.live; i += kReplayThreads) {
      positions[i] = positions_[i];
      if (rule_.squeezed) places[i] = places_[i];
      if constexpr (!std::is_empty_v<Slot>) states[i] = states_[i];
    }
    positions_ = positions;
    places_ = places;
    if constexpr (!std::is_empty_v<Slot>) states_ = states;
    in_room_ = true;
    __syncthreads();
  }
  __device__ void move_out() {
    if (!in_room_) return;
    const ReplayCaches& caches = args_.caches;
    auto* const states = reinterpret_cast<Slot*>(caches.states + base_ * caches.slot_stride);
    for (std::uint32_t i = thread_; i < progress_.live; i += kReplayThreads) {
      caches.positions[base_ + i] = positions_[i];
      if (rule_.squeezed) caches.places[base_ + i] = places_[i];
      if constexpr (!std::is_empty_v<Slot>) states[i] = states_[i];
    }
  }

  __device__ void step(int i) {
    const std::uint32_t query = args_.rows.first + i;
    const ReplayAdmission now = admission();
    if (query == now.first) begin(now);
    const std::uint32_t age = now.first + now.tokens - 1 - query;
    visible_ = progress_.live - age;
    const int index = args_.span.index[query];
    const bool measures = index >= 0, last = age == 0;
    const bool observes = P::kInfo.needs != Needs::nothing && (kAsks || age < tail());
    if (observes || measures) look(i, query, age, index, observes);
    if (args_.figures.kept) note_kept(query);
    if (!last) return;
    if (now.tokens > 1) observe_all(now);
    if (P::kInfo.needs == Needs::nothing || now.tokens > 1 || !observes) rank_all(query + 1);
    ++progress_.admission;
  }

  __device__ std::uint32_t tail() const {
    if constexpr (P::kInfo.weighted) return P::tail(params_);
    return kNoTail;
  }
  __device__ float weight(std::uint32_t age) const {
    if constexpr (P::kInfo.weighted) return P::weight(age, params_);
    return 1.0f;
  }

  // Making room and admitting.

  __device__ void begin(const ReplayAdmission& now) {
    const std::uint32_t leaving = surplus();
    std::uint32_t first = progress_.live;
    if (leaving == 1 && now.tokens == 1 && progress_.victim > 0) {
      first = static_cast<std::uint32_t>(progress_.victim - 1);
      if (rule_.squeezed) close_up();
    } else {
      if (leaving > 0) evict_many(now.first, leaving);
      first = progress_.live;
      progress_.live += now.tokens;
    }
    progress_.evictions += leaving;
    progress_.most_live = max(progress_.most_live, progress_.live);
    progress_.victim = 0;
    const Step admits = step_at(now.first, now.tokens);
    const std::uint32_t end = first + now.tokens;
    for (std::uint32_t i = thread_; i < end; i += kReplayThreads) {
      if (i < first) continue;
      const Token token{now.first + (i - first)};
      positions_[i] = token.position;
      if (rule_.squeezed) places_[i] = token.position;
      Slot state;
      P::admit(state, token, params_, admits);
      if constexpr (!std::is_empty_v<Slot>) states_[i] = state;
    }
    if (now.tokens > 1 && P::kInfo.needs != Needs::nothing)
      for (std::uint32_t i = thread_; i < progress_.live; i += kReplayThreads)
        args_.caches.seen[base_ + i] = {};
  }

  /// Tokens that are older than the one victim have lost a younger one.
  __device__ void close_up() {
    for (std::uint32_t i = thread_; i < progress_.live; i += kReplayThreads)
      places_[i] += positions_[i] < progress_.victim_position ? 1 : 0;
  }

  __device__ void evict_many(std::uint32_t now, std::uint32_t leaving) {
    const std::uint32_t live = progress_.live, kept = live - leaving;
    const Step leaves = step_at(now, 0);
    std::uint64_t* const ranks = args_.caches.ranks + base_;
    std::uint32_t *const holes = args_.caches.holes + base_, *const fillers =
                                                                 args_.caches.fillers + base_;
    for (std::uint32_t i = thread_; i < live; i += kReplayThreads)
      ranks[i] = P::rank(state(i), Token{positions_[i]}, params_, leaves);
    if (thread_ == 0) shared_.moves = 0;
    __syncthreads();
    progress_.live = kept;
    if (kept == 0) return;
    const LeavingKeys keys{ranks, positions_, guards_, now};
    const LeavingThreshold threshold = select_leaving(shared_.selection, keys, live, leaving);
    const auto stays = [&](std::uint32_t i) { return !threshold.leaves(keys[i]); };
    number_stayers(shared_.selection, live, stays,
                   [&](std::uint32_t i, bool here, std::uint32_t before) {
                     if (i < kept && !here) holes[i - before] = i;
                   });
    // As many stay beyond `kept` as leave before it.
    number_stayers(shared_.selection, live, stays,
                   [&](std::uint32_t i, bool here, std::uint32_t before) {
                     if (i < kept || !here) return;
                     fillers[kept - before - 1] = i;
                     atomicMax(&shared_.moves, kept - before);
                   });
    for (std::uint32_t m = thread_; m < shared_.moves; m += kReplayThreads) {
      positions_[holes[m]] = positions_[fillers[m]];
      if constexpr (!std::is_empty_v<Slot>) states_[holes[m]] = states_[fillers[m]];
    }
    __syncthreads();
    if (rule_.squeezed) number_by_age(now);
  }

  __device__ void number_by_age(std::uint32_t now) {
    for (std::uint32_t i = thread_; i < progress_.live; i += kReplayThreads) {
      std::uint32_t younger = 0;
      for (std::uint32_t j = 0; j < progress_.live; ++j)
        younger += positions_[j] > positions_[i] ? 1 : 0;
      places_[i] = now - 1 - younger;
    }
  }

  __device__ Slot state(std::uint32_t i) const {
    if constexpr (std::is_empty_v<Slot>)
      return {};
    else
      return states_[i];
  }

  // Attending.

  /// Calls each(slot, its exponentials) for this thread's slots; the first of them are in `held`.
  template <class Each>
  __device__ void for_slots(const Quads (&held)[kHeld], Each each) const {
#pragma unroll
    for (int k = 0; k < kHeld; ++k)
      if (const std::uint32_t i = thread_ + k * kReplayThreads; i < visible_) each(i, held[k]);
    for (std::uint32_t i = thread_ + kHeld * kReplayThreads; i < visible_; i += kReplayThreads)
      each(i, exponentials(i));
  }
  __device__ Quads exponentials(std::uint32_t i) const {
    Quads e;
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad)
      e.quad[quad] = own_ ? own_[quad * args_.caches.unit_slots + i]
                          : shared_row_[quad * std::int64_t{args_.shape.tokens} + positions_[i]];
    return e;
  }
  __device__ void hold(Quads (&held)[kHeld]) const {
#pragma unroll
    for (int k = 0; k < kHeld; ++k)
      if (const std::uint32_t i = thread_ + k * kReplayThreads; i < visible_)
        held[k] = exponentials(i);
  }

  __device__ void look(int i, std::uint32_t query, std::uint32_t age, int index, bool observes) {
    Quads held[kHeld];
    shared_row_ = args_.rows.e + row(i) * kQuads * args_.shape.tokens;
    own_ = nullptr;
    const bool measures = index >= 0, samples = measures && index % args_.span.sample_every == 0;
    Totals totals;
    bool lost = false;
    if (!rule_.squeezed || measures) {
      hold(held);
      totals = total(held, i, query, measures);
      if (measures) measure(i, query, totals);
      for (int head = 0; head < args_.shape.group; ++head)
        lost |= component(totals.sum[head / 4], head % 4) < kLostSum;
    }
    if ((rule_.squeezed || lost) && (observes || samples)) {
      take_own(i, query);
      hold(held);
      totals = total(held, i, query, false);
    }
    if (observes) observe(held, totals, query, age);
    if (samples) measure_output(i, index, totals);
  }

  /// Folds over the block: sums, maxima where the policy asks, and where `counts` the tokens
  /// before the query that the full row requests.
  __device__ Totals total(const Quads (&held)[kHeld], int i, std::uint32_t query, bool counts) {
    Totals own{};
    Quads least;
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad)
      least.quad[quad] = args_.rows.least[row(i) * kQuads + quad];
    for_slots(held, [&](std::uint32_t slot, const Quads& e) {
      const std::uint32_t counted = counts && positions_[slot] < query ? 1 : 0;
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        const float4 x = e.quad[quad], bound = least.quad[quad];
        float4& sum = own.sum[quad];
        sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
        if (kAsks) {
          float4& most = own.most[quad];
          most = {fmaxf(most.x, x.x), fmaxf(most.y, x.y), fmaxf(most.z, x.z), fmaxf(most.w, x.w)};
        }
        uint4& hits = own.hits[quad];
        hits.x += x.x >= bound.x ? counted : 0, hits.y += x.y >= bound.y ? counted : 0;
        hits.z += x.z >= bound.z ? counted : 0, hits.w += x.w >= bound.w ? counted : 0;
      }
    });
    return fold(own, counts);
  }

  __device__ Totals fold(const Totals& own, bool counts) {
    const unsigned lane = thread_ % kWarpSize;
    parity_ ^= 1;
    float* const mine = shared_.folded[parity_][thread_ / kWarpSize];
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      float* const at = mine + 12 * quad;
      const float sum = warp_fold4(own.sum[quad], Add{});
      if (lane < 4) at[lane] = sum;
      if (counts) {
        const uint4 hits = own.hits[quad];
        const std::uint32_t low = __reduce_add_sync(~0u, hits.x | hits.y << 16),
                            high = __reduce_add_sync(~0u, hits.z | hits.w << 16);
        if (lane < 4)
          at[4 + lane] = __uint_as_float((lane < 2 ? low : high) >> (lane % 2 * 16) & 0xffff);
      }
      if (kAsks) {
        const float most = warp_fold4(own.most[quad], Larger{});
        if (lane < 4) at[8 + lane] = most;
      }
    }
    __syncthreads();
    float value = 0;
    std::uint32_t count = 0;
    if (lane < 12 * kQuads) {
      const unsigned kind = lane % 12 / 4;
      for (int warp = 0; warp < kReplayWarps; ++warp) {
        const float other = shared_.folded[parity_][warp][lane];
        if (kind == 0) value += other;
        if (kind == 1) count += __float_as_uint(other);
        if (kind == 2) value = fmaxf(value, other);
      }
      if (kind == 1) value = __uint_as_float(count);
    }
    Totals all;
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      all.sum[quad] = of_lanes(value, 12 * quad);
      const float4 hits = of_lanes(value, 12 * quad + 4);
      all.hits[quad] = {__float_as_uint(hits.x), __float_as_uint(hits.y), __float_as_uint(hits.z),
                        __float_as_uint(hits.w)};
      if (kAsks) all.most[quad] = of_lanes(value, 12 * quad + 8);
    }
    return all;
  }

  __device__ void measure(int i, std::uint32_t query, const Totals& totals) {
    if (thread_ >= static_cast<unsigned>(args_.shape.group)) return;
    const int quad = thread_ / 4, head = thread_ % 4;
    const auto sums = reinterpret_cast<const float*>(args_.rows.sums + row(i) * kQuads);
    const auto wanted = reinterpret_cast<const std::uint32_t*>(args_.rows.wanted + row(i) * kQuads);
    const bool all = visible_ == query + 1;
    float kept = 0;
    std::uint32_t hits = 0;
#pragma unroll
    for (int q = 0; q < kQuads; ++q)
      if (q == quad) {
        kept = component(totals.sum[q], head);
        const uint4 h = totals.hits[q];
        hits = head == 0 ? h.x : head == 1 ? h.y : head == 2 ? h.z : h.w;
      }
    shared_.recall[i][thread_] = all ? 1.0f : kept / sums[thread_];
    shared_.missed[i][thread_] = all ? 0 : wanted[thread_] - hits;
  }

  /// The cache's own exponentials, by its own maximum: of squeezed positions, or of a row whose
  /// shared exponentials are too small. Leaves them in own_.
  __device__ void take_own(int i, std::uint32_t query) {
    float4* const own =
        args_.caches.own + unit_ * args_.caches.unit_slots * kQuads + rule_.first_slot;
    const ReplayShape& shape = args_.shape;
    const Type rounding = rule_.squeezed ? Type::f32 : shape.rounding;
    __syncthreads();
    const float* const queries =
        args_.tensors.queries +
        (std::int64_t{unit_} * shape.tokens + query) * shape.group * shape.head_size;
    for (int d = thread_; d < kHeads * shape.head_size; d += kReplayThreads) {
      const int head = d / shape.head_size;
      shared_.queries[head][d % shape.head_size] =
          head < shape.group ? rounded(queries[d], rounding) : 0.0f;
    }
    __syncthreads();
    for (std::uint32_t slot = thread_ / kWarpSize; slot < visible_; slot += kReplayWarps) {
      const std::uint32_t position = positions_[slot],
                          place = rule_.squeezed ? places_[slot] : position;
      if (rule_.squeezed && place == position) {
        if (thread_ % kWarpSize < kQuads)
          own[thread_ % kWarpSize * args_.caches.unit_slots + slot] =
              args_.rows.logits[(row(i) * kQuads + thread_ % kWarpSize) * shape.tokens + position];
      } else {
        multiply(position, place, rounding, own + slot);
      }
    }
    __syncthreads();
    exponentiate(own);
    own_ = own;
  }

  __device__ static float rounded(float x, Type type) {
    if (type == Type::bf16) return __bfloat162float(__float2bfloat16_rn(x));
    if (type == Type::f16) return __half2float(__float2half_rn(x));
    return x;
  }

  /// A warp: the key at `position`, turned to `place`, by all queries.
  __device__ void multiply(std::uint32_t position, std::uint32_t place, Type rounding, float4* to) {
    const ReplayShape& shape = args_.shape;
    const int half = shape.rotated / 2, lane = thread_ % kWarpSize;
    const float* const key =
        args_.tensors.keys + (std::int64_t{unit_} * shape.tokens + position) * shape.head_size;
    const float2* const turns = args_.tensors.turns + std::int64_t{place} * half;
    float4 sum[kQuads] = {};
    const auto add = [&](int d, float x) {
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        sum[quad].x = fmaf(shared_.queries[4 * quad][d], x, sum[quad].x);
        sum[quad].y = fmaf(shared_.queries[4 * quad + 1][d], x, sum[quad].y);
        sum[quad].z = fmaf(shared_.queries[4 * quad + 2][d], x, sum[quad].z);
        sum[quad].w = fmaf(shared_.queries[4 * quad + 3][d], x, sum[quad].w);
      }
    };
    for (int d = lane; d < half; d += kWarpSize) {
      const float a = key[d], b = key[d + half];
      const float2 turn = turns[d];
      add(d, rounded(a * turn.x - b * turn.y, rounding));
      add(d + half, rounded(b * turn.x + a * turn.y, rounding));
    }
    for (int d = shape.rotated + lane; d < shape.head_size; d += kWarpSize)
      add(d, rounded(key[d], rounding));
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      const float folded = warp_fold4(sum[quad], Add{}) * shape.softmax_scale;
      if (lane < 4) reinterpret_cast<float*>(to + quad * args_.caches.unit_slots)[lane] = folded;
    }
  }

  /// Logits to exponentials, the largest 1.
  __device__ void exponentiate(float4* own) {
    constexpr float kLowest = -3.4e38f;
    const unsigned lane = thread_ % kWarpSize;
    parity_ ^= 1;
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      float4 most{kLowest, kLowest, kLowest, kLowest};
      for (std::uint32_t i = thread_; i < visible_; i += kReplayThreads) {
        const float4 x = own[quad * args_.caches.unit_slots + i];
        most = {fmaxf(most.x, x.x), fmaxf(most.y, x.y), fmaxf(most.z, x.z), fmaxf(most.w, x.w)};
      }
      const float folded = warp_fold4(most, Larger{});
      if (lane < 4) shared_.folded[parity_][thread_ / kWarpSize][4 * quad + lane] = folded;
    }
    __syncthreads();
    float largest = kLowest;
    if (lane < kHeads)
      for (int warp = 0; warp < kReplayWarps; ++warp)
        largest = fmaxf(largest, shared_.folded[parity_][warp][lane]);
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      const float4 most = of_lanes(largest, 4 * quad);
      for (std::uint32_t i = thread_; i < visible_; i += kReplayThreads) {
        float4& x = own[quad * args_.caches.unit_slots + i];
        x = {expf(x.x - most.x), expf(x.y - most.y), expf(x.z - most.z), expf(x.w - most.w)};
      }
    }
  }

  // Observing and ranking.

  __device__ Quads inverse(const Totals& totals) const {
    Quads inverse;
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      const int heads = args_.shape.group - 4 * quad;
      const float4 sum = totals.sum[quad];
      inverse.quad[quad] = {1 / sum.x, heads > 1 ? 1 / sum.y : 0.0f, heads > 2 ? 1 / sum.z : 0.0f,
                            heads > 3 ? 1 / sum.w : 0.0f};
    }
    return inverse;
  }

  /// What one query shows: to the states at once where it is alone in its admission, which is
  /// ranked then too.
  __device__ void observe(const Quads (&held)[kHeld], const Totals& totals, std::uint32_t query,
                          std::uint32_t age) {
    if constexpr (P::kInfo.needs != Needs::nothing) {
      const Quads inverses = inverse(totals), least = least_requested(totals, inverses);
      const float of_age = weight(age);
      const auto seen_by = [&](const Quads& e) {
        Observation seen{.queries = 1};
        if constexpr (kAsks) {
          seen.requests = asked(e, least) ? 1 : 0;
          seen.last_request = query;
        } else {
          seen.mass = mass(e, inverses, of_age);
        }
        return seen;
      };
      if (admission().tokens > 1) {
        for_slots(held, [&](std::uint32_t i, const Quads& e) {
          const Observation seen = seen_by(e);
          Observation& all = args_.caches.seen[base_ + i];
          all.mass += seen.mass;
          all.requests += seen.requests;
          if (seen.requests) all.last_request = query;
        });
        return;
      }
      const Step attended = step_at(query, 1), leaves = step_at(query + 1, 0);
      const bool ranks = ranks_next();
      Leaving mine = Leaving::none();
      for_slots(held, [&](std::uint32_t i, const Quads& e) {
        Slot own = states_[i];
        P::observe(own, seen_by(e), params_, attended);
        states_[i] = own;
        if (ranks) mine = first_to_leave(mine, leaving(i, own, leaves));
      });
      if (ranks) choose(mine);
    }
  }

  __device__ Quads least_requested(const Totals& totals, const Quads& inverses) const {
    Quads least{};
    if constexpr (kAsks) {
      const float never = __int_as_float(0x7f800000);
      const auto bound = [&](float sum, float most, float over) {
        if (over == 0) return never;
        const float p = request_floor(fixed_mass(1.0f, most * over), args_.shape.threshold16);
        return p < 0 ? 0.0f : p * sum;
      };
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        const float4 sum = totals.sum[quad], most = totals.most[quad], over = inverses.quad[quad];
        least.quad[quad] = {bound(sum.x, most.x, over.x), bound(sum.y, most.y, over.y),
                            bound(sum.z, most.z, over.z), bound(sum.w, most.w, over.w)};
      }
    }
    return least;
  }
  __device__ static bool asked(const Quads& e, const Quads& least) {
    bool any = false;
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      const float4 x = e.quad[quad], bound = least.quad[quad];
      any |= x.x >= bound.x || x.y >= bound.y || x.z >= bound.z || x.w >= bound.w;
    }
    return any;
  }
  __device__ static std::uint64_t mass(const Quads& e, const Quads& inverses, float of_age) {
    MassSum sum;
    std::uint64_t weighted = 0;
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      const float4 x = e.quad[quad], over = inverses.quad[quad];
      const float p[] = {x.x * over.x, x.y * over.y, x.z * over.z, x.w * over.w};
#pragma unroll
      for (int head = 0; head < 4; ++head) {
        if constexpr (P::kInfo.weighted)
          weighted += fixed_mass(of_age, p[head]);
        else
          sum.add(p[head]);
      }
    }
    return P::kInfo.weighted ? weighted : sum.total(kHeads);
  }

  /// After an admission of several queries.
  __device__ void observe_all(const ReplayAdmission& now) {
    if constexpr (P::kInfo.needs != Needs::nothing) {
      const Step attended = step_at(now.first, now.tokens);
      const std::uint32_t older = progress_.live - now.tokens;
      for (std::uint32_t i = thread_; i < progress_.live; i += kReplayThreads) {
        Observation seen = args_.caches.seen[base_ + i];
        seen.queries = i < older ? now.tokens : now.tokens - (i - older);
        P::observe(states_[i], seen, params_, attended);
      }
    }
  }

  /// Whether one token leaves, for one to enter, when the next admission begins.
  __device__ bool ranks_next() const { return surplus() == 1 && admission(1).tokens == 1; }

  __device__ void rank_all(std::uint32_t now) {
    if (!ranks_next()) return;
    const Step leaves = step_at(now, 0);
    Leaving mine = Leaving::none();
    for (std::uint32_t i = thread_; i < progress_.live; i += kReplayThreads)
      mine = first_to_leave(mine, leaving(i, state(i), leaves));
    choose(mine);
  }
  __device__ Leaving leaving(std::uint32_t i, const Slot& own, const Step& leaves) const {
    const Token token{positions_[i]};
    return {{guards_.guard(token.position, leaves.now), P::rank(own, token, params_, leaves),
             token.position},
            static_cast<int>(i)};
  }
  __device__ void choose(Leaving mine) {
    mine = block_first_to_leave(mine, shared_.leaving);
    if (thread_ == 0) shared_.leaving[0] = mine;
    __syncthreads();
    progress_.victim = shared_.leaving[0].slot + 1;
    progress_.victim_position = shared_.leaving[0].key.position;
    __syncthreads();
  }

  // Figures.

  /// The kept tokens' output beside the full cache's. A warp has every eighth token, its lanes four
  /// dimensions each; the warps' sums are added in order.
  __device__ void measure_output(int i, int index, const Totals& totals) {
    const ReplayShape& shape = args_.shape;
    const bool all = visible_ == args_.rows.first + i + 1 && !rule_.squeezed;
    __syncthreads();
    for (int first = 0; first < shape.head_size && !all; first += kReplayDims)
      take_output(first, inverse(totals));
    const int lane = thread_ % kWarpSize, warp = thread_ / kWarpSize;
    if (warp < shape.group) {
      const float* const full =
          args_.rows.outputs + (row(i) * shape.group + warp) * shape.head_size;
      double error = 0, size = 0;
      for (int d = lane; d < shape.head_size; d += kWarpSize) {
        const double of_full = full[d];
        const double difference = all ? 0.0 : of_full - double{shared_.output[warp][d]};
        error += difference * difference;
        size += of_full * of_full;
      }
      error = warp_total(error), size = warp_total(size);
      if (lane == 0) note_error(index, warp, error, size);
    }
    __syncthreads();
    if (thread_ != 0) return;
    double* const errors = args_.figures.errors +
                           2 * (figure() * args_.figures.samples + index / args_.span.sample_every);
    for (int head = 0; head < shape.group; ++head) {
      errors[0] += shared_.errors[head][0];
      errors[1] += shared_.errors[head][1];
    }
  }

  /// Of dimensions [first, first + kReplayDims).
  __device__ void take_output(int first, const Quads& inverses) {
    const ReplayShape& shape = args_.shape;
    const int warp = thread_ / kWarpSize, d = first + 4 * (thread_ % kWarpSize);
    const float* const values =
        args_.tensors.values + std::int64_t{unit_} * shape.tokens * shape.head_size;
    float4 sums[kHeads] = {};
    if (d < shape.head_size)
      for (std::uint32_t slot = warp; slot < visible_; slot += kReplayWarps) {
        const Quads e = exponentials(slot);
        const float4 value = *reinterpret_cast<const float4*>(
            values + std::int64_t{positions_[slot]} * shape.head_size + d);
#pragma unroll
        for (int head = 0; head < kHeads; ++head) {
          const float weight = component(e.quad[head / 4], head % 4);
          float4& sum = sums[head];
          sum.x = fmaf(weight, value.x, sum.x), sum.y = fmaf(weight, value.y, sum.y);
          sum.z = fmaf(weight, value.z, sum.z), sum.w = fmaf(weight, value.w, sum.w);
        }
      }
    for (int turn = 0; turn < kReplayWarps; ++turn) {
      if (warp == turn && d < shape.head_size)
#pragma unroll
        for (int head = 0; head < kHeads; ++head) {
          const float over = component(inverses.quad[head / 4], head % 4);
          float4& out = *reinterpret_cast<float4*>(&shared_.output[head][d]);
          const float4 before = turn == 0 ? float4{} : out, sum = sums[head];
          out = {fmaf(sum.x, over, before.x), fmaf(sum.y, over, before.y),
                 fmaf(sum.z, over, before.z), fmaf(sum.w, over, before.w)};
        }
      __syncthreads();
    }
  }

  __device__ static double warp_total(double value) {
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2)
      value += __shfl_xor_sync(~0u, value, distance);
    return value;
  }

  __device__ void note_error(int index, int head, double error, double size) {
    shared_.errors[head][0] = error;
    shared_.errors[head][1] = size;
    if (size > 0) {
      sum_of(ReplaySum::error, head, block_of(index)) += sqrt(error / size);
      sum_of(ReplaySum::errors, head, block_of(index)) += 1;
    } else {
      ++args_.figures.zero_outputs[figure() * kHeads + head];
    }
  }

  __device__ int block_of(int index) const {
    return static_cast<int>(std::int64_t{index} * args_.span.blocks / args_.span.size);
  }
  __device__ double& sum_of(ReplaySum kind, int head, int block) const {
    return args_.figures.sums[((figure() * kReplaySums + static_cast<int>(kind)) * kHeads + head) *
                                  kReplaySpanBlocks +
                              block];
  }

  /// Of the block of queries: a thread for each sum and head.
  __device__ void sum_figures() {
    for (int at = thread_; at < args_.rows.count * args_.shape.group; at += kReplayThreads) {
      const int i = at / args_.shape.group, head = at % args_.shape.group;
      if (args_.span.index[args_.rows.first + i] >= 0)
        shared_.nll[i][head] =
            static_cast<float>(-log(fmax(double{shared_.recall[i][head]}, 1e-9)));
    }
    __syncthreads();
    const int head = thread_ % kMostReplayGroup, kind = thread_ / kMostReplayGroup;
    if (head >= args_.shape.group || kind > static_cast<int>(ReplaySum::wanted)) return;
    for (int i = 0; i < args_.rows.count; ++i) {
      const int index = args_.span.index[args_.rows.first + i];
      if (index < 0) continue;
      const auto wanted =
          reinterpret_cast<const std::uint32_t*>(args_.rows.wanted + row(i) * kQuads);
      const double values[] = {shared_.recall[i][head], shared_.nll[i][head],
                               static_cast<double>(shared_.missed[i][head]),
                               static_cast<double>(wanted[head])};
      sum_of(static_cast<ReplaySum>(kind), head, block_of(index)) += kind == 0   ? values[0]
                                                                     : kind == 1 ? values[1]
                                                                     : kind == 2 ? values[2]
                                                                                 : values[3];
    }
  }

  __device__ void note_kept(std::uint32_t query) const {
    std::uint32_t* const bits =
        args_.figures.kept + (figure() * args_.shape.tokens + query) * args_.figures.words;
    for (std::uint32_t i = thread_; i < visible_; i += kReplayThreads)
      atomicOr(bits + positions_[i] / 32, 1u << positions_[i] % 32);
  }

  const ReplayArgs& args_;
  ReplayShared& shared_;
  const int unit_, config_;
  const ReplayRule rule_;
  const Guards guards_;
  const std::uint32_t thread_;
  const std::int64_t base_;
  typename P::Params params_{};
  ReplayProgress progress_;
  std::uint32_t *positions_, *places_;
  Slot* states_;
  bool in_room_ = false;
  int parity_ = 0;
  std::uint32_t visible_ = 0;
  const float4* shared_row_ = nullptr;  // [quad, token]: of the query
  const float4* own_ = nullptr;         // [quad, slot]: where the shared row is of no use
};

/// A block for each member (x) and unit (y).
template <class P, int kQuads>
__global__ void __launch_bounds__(kReplayThreads)
    replay_walk(const __grid_constant__ ReplayArgs args, bool in_room) {
  extern __shared__ __align__(16) std::byte room[];
  __shared__ ReplayShared shared;
  ReplayWalk<P, kQuads>(args, shared, in_room ? room : nullptr).run();
}

template <Policy P>
ReplayPolicy replay_policy_of() {
  return {.name = P::kInfo.name,
          .slot_bytes = kSlotBytes<P>,
          .params_bytes = kParamsBytes<P>,
          .params = write_params<P>,
          .kernels = {reinterpret_cast<const void*>(replay_walk<P, 1>),
                      reinterpret_cast<const void*>(replay_walk<P, 2>)}};
}

}  // namespace kvlab::kernels
