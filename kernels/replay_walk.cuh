// One policy's caches through a block of queries: a thread block for each cache (unit and
// configuration), which takes the queries in order. A thread has every 256th slot (every 512th of a
// large cache).
//
// Bytes: for each live token and query 16 a quad, its exponentials (from the L2 cache: the caches
// of a unit read the same rows), and the values of what is kept for each sampled query. States
// stay in shared memory through the block, where they fit.
#pragma once

#include <algorithm>

#include "kernels/device/element.cuh"
#include "kernels/device/fold.cuh"
#include "kernels/device/load.cuh"
#include "kernels/device/mass_sum.hpp"
#include "kernels/device/select_leaving.cuh"
#include "kernels/replay.hpp"
#include "policies/bytes.hpp"

namespace kvlab::kernels {

inline constexpr int kReplayThreads = 512;  ///< at most; 256 where a cache is small
inline constexpr int kReplayWarps = kReplayThreads / kWarpSize;
inline constexpr int kReplayHeld = 4;  ///< slots of a thread whose exponentials are in registers
inline constexpr int kReplayDims = 4 * kWarpSize;  ///< of a value that a warp takes at once
/// Below this sum, exponentials taken with the maximum of a larger row have lost bits.
inline constexpr float kLostSum = 0x1p-60f;

/// A token in the order of leaving, packed: guard and rank, the rank's last bits and the position.
struct ReplayLeaving {
  std::uint64_t high = ~std::uint64_t{0};
  std::uint32_t low = ~0u;
  std::int32_t slot = -1;

  ReplayLeaving() = default;
  __device__ ReplayLeaving(std::uint32_t guard, std::uint64_t rank, std::uint32_t position,
                           std::uint32_t at)
      : high(std::uint64_t{guard} << 62 | rank >> 2),
        low(static_cast<std::uint32_t>(rank) << 30 | position),
        slot(static_cast<std::int32_t>(at)) {}
  __device__ bool operator<(const ReplayLeaving& other) const {
    return high < other.high || (high == other.high && low < other.low);
  }
  __device__ std::uint32_t position() const { return low & (1u << 30) - 1; }
};

/// The first among the warp's, in every lane.
__device__ inline ReplayLeaving warp_first(ReplayLeaving mine) {
  const auto top = static_cast<std::uint32_t>(mine.high >> 32),
             middle = static_cast<std::uint32_t>(mine.high);
  const std::uint32_t least_top = __reduce_min_sync(~0u, top);
  bool first = top == least_top;
  const std::uint32_t least_middle = __reduce_min_sync(~0u, first ? middle : ~0u);
  first &= middle == least_middle;
  const std::uint32_t least_low = __reduce_min_sync(~0u, first ? mine.low : ~0u);
  first &= mine.low == least_low;
  const int lane = __ffs(static_cast<int>(__ballot_sync(~0u, first))) - 1;
  ReplayLeaving found;
  found.high = std::uint64_t{least_top} << 32 | least_middle;
  found.low = least_low;
  found.slot = __shfl_sync(~0u, mine.slot, lane);
  return found;
}

struct ReplayShared {
  union {
    SelectionShared selection;
    float output[kMostReplayGroup][kMostReplayHeadSize];
  };
  double errors[kMostReplayGroup][2];
  float folded[2][kReplayWarps][24];  // by parity: sums, hits (bits), maxima
  uint4 first[2][kReplayWarps];       // by parity: who leaves first of a warp's
  std::uint32_t moves, old;
  float kept[kMostReplayQueries][kMostReplayGroup];  // sums; negative: everything is kept
  std::uint32_t hits[kMostReplayQueries][kMostReplayGroup];
};

/// Bytes of shared memory for the slots of a cache: positions, places, states.
constexpr std::size_t replay_room(std::uint32_t slots, std::size_t slot_bytes) {
  return (std::size_t{slots} * (2 * sizeof(std::uint32_t) + slot_bytes) + 15) / 16 * 16;
}

template <class P, int kQuads>
class ReplayWalk {
  using Slot = typename P::Slot;
  static constexpr int kHeads = 4 * kQuads;
  static constexpr int kHeld = kReplayHeld / kQuads;
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
        threads_(blockDim.x),
        warps_(blockDim.x / kWarpSize),
        base_(unit_ * args.caches.unit_slots + rule_.first_slot) {
    if constexpr (!std::is_empty_v<typename P::Params>)
      params_ = *reinterpret_cast<const typename P::Params*>(args.params + rule_.params);
    const ReplayCaches& caches = args.caches;
    positions_ = caches.positions + base_;
    places_ = caches.places + base_;
    states_ = reinterpret_cast<Slot*>(caches.states + base_ * caches.slot_stride);
    progress_ = progress();
    now_ = admission(progress_.admission);
    next_ = admission(progress_.admission + 1);
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
  __device__ ReplayAdmission admission(std::uint32_t index) const {
    return args_.admissions[rule_.admissions + index];
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
    for (std::uint32_t i = thread_; i < progress_.live; i += threads_) {
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
    for (std::uint32_t i = thread_; i < progress_.live; i += threads_) {
      caches.positions[base_ + i] = positions_[i];
      if (rule_.squeezed) caches.places[base_ + i] = places_[i];
      if constexpr (!std::is_empty_v<Slot>) states[i] = states_[i];
    }
  }

  __device__ void step(int i) {
    const std::uint32_t query = args_.rows.first + i;
    const ReplayAdmission now = now_;
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
    now_ = next_;
    if (next_.tokens > 0) next_ = admission(progress_.admission + 1);
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
    for (std::uint32_t i = thread_; i < end; i += threads_) {
      if (i < first) continue;
      const Token token{now.first + (i - first)};
      positions_[i] = token.position;
      if (rule_.squeezed) places_[i] = token.position;
      Slot state;
      P::admit(state, token, params_, admits);
      if constexpr (!std::is_empty_v<Slot>) states_[i] = state;
    }
    if (now.tokens > 1 && P::kInfo.needs != Needs::nothing)
      for (std::uint32_t i = thread_; i < progress_.live; i += threads_)
        args_.caches.seen[base_ + i] = {};
  }

  /// Tokens that are older than the one victim have lost a younger one.
  __device__ void close_up() {
    for (std::uint32_t i = thread_; i < progress_.live; i += threads_)
      places_[i] += positions_[i] < progress_.victim_position ? 1 : 0;
  }

  __device__ void evict_many(std::uint32_t now, std::uint32_t leaving) {
    const std::uint32_t live = progress_.live, kept = live - leaving;
    const Step leaves = step_at(now, 0);
    std::uint64_t* const ranks = args_.caches.ranks + base_;
    std::uint32_t *const holes = args_.caches.holes + base_, *const fillers =
                                                                 args_.caches.fillers + base_;
    for (std::uint32_t i = thread_; i < live; i += threads_)
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
    for (std::uint32_t m = thread_; m < shared_.moves; m += threads_) {
      positions_[holes[m]] = positions_[fillers[m]];
      if constexpr (!std::is_empty_v<Slot>) states_[holes[m]] = states_[fillers[m]];
    }
    __syncthreads();
    if (rule_.squeezed) number_by_age(now);
  }

  __device__ void number_by_age(std::uint32_t now) {
    for (std::uint32_t i = thread_; i < progress_.live; i += threads_) {
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
      if (const std::uint32_t i = thread_ + k * threads_; i < visible_) each(i, held[k]);
    for (std::uint32_t i = thread_ + kHeld * threads_; i < visible_; i += threads_)
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
      if (const std::uint32_t i = thread_ + k * threads_; i < visible_) held[k] = exponentials(i);
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
      if (!rule_.squeezed)
        for (int head = 0; head < args_.shape.group; ++head)
          lost |= component(totals.sum[head / 4], head % 4) < kLostSum;
    }
    if ((rule_.squeezed || lost) && (observes || samples)) {
      take_own(held, i, query, samples);
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
      for (int warp = 0; warp < warps_; ++warp) {
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
    if (thread_ >= static_cast<unsigned>(kHeads)) return;
    float kept = 0;
    std::uint32_t hits = 0;
#pragma unroll
    for (int head = 0; head < kHeads; ++head)
      if (head == static_cast<int>(thread_)) {
        kept = component(totals.sum[head / 4], head % 4);
        const uint4 h = totals.hits[head / 4];
        hits = head % 4 == 0 ? h.x : head % 4 == 1 ? h.y : head % 4 == 2 ? h.z : h.w;
      }
    shared_.kept[i][thread_] = visible_ == query + 1 ? -1.0f : kept;
    shared_.hits[i][thread_] = hits;
  }

  /// The cache's own exponentials, by its own maximum: of squeezed positions, or of a row whose
  /// shared exponentials are too small. In `held`, the rest (`stores`: all) at own_.
  __device__ void take_own(Quads (&held)[kHeld], int i, std::uint32_t query, bool stores) {
    float4* const own =
        args_.caches.own + unit_ * args_.caches.unit_slots * kQuads + rule_.first_slot;
    const ReplayShape& shape = args_.shape;
    const float4* const logits = args_.rows.logits + row(i) * kQuads * shape.tokens;
    if (thread_ == 0) shared_.old = 0;
    __syncthreads();
    std::uint32_t* const old = args_.caches.holes + base_;
    list_old(old);
    __syncthreads();
    for (int quad = 0; quad < kQuads; ++quad) {
      for (int d = 0; d < shape.rotated / 2; d += 2 * kWarpSize) multiply(old, query, quad, d, own);
      for (int d = shape.rotated; d < shape.head_size; d += 2 * kWarpSize)
        multiply(old, query, quad, d, own);
    }
    __syncthreads();
    exponentiate(held, logits, own, stores);
    own_ = own;
  }

  /// Whether the logits of a slot are not those of a row that all caches share.
  __device__ bool is_old(std::uint32_t i) const {
    return !rule_.squeezed || places_[i] != positions_[i];
  }
  __device__ void list_old(std::uint32_t* old) {
    for (std::uint32_t i = thread_; i - thread_ < visible_; i += threads_) {
      const bool own = i < visible_ && is_old(i);
      const std::uint32_t mask = __ballot_sync(~0u, own), lane = thread_ % kWarpSize;
      std::uint32_t first = 0;
      if (lane == 0 && mask) first = atomicAdd(&shared_.old, __popc(mask));
      first = __shfl_sync(~0u, first, 0);
      if (own) old[first + __popc(mask & (1u << lane) - 1)] = i;
    }
  }

  __device__ static float rounded(float x, Type type) {
    if (type == Type::bf16) return __bfloat162float(__float2bfloat16_rn(x));
    if (type == Type::f16) return __half2float(__float2half_rn(x));
    return x;
  }

  /// Some dimensions of the listed slots' keys, turned to their places, by a quad's queries: a warp
  /// takes four slots at a time, a lane dimensions d and d + 1 (and their partners, if they turn).
  __device__ void multiply(const std::uint32_t* old, std::uint32_t query, int quad, int first,
                           float4* own) {
    const ReplayShape& shape = args_.shape;
    const int half = shape.rotated / 2, lane = thread_ % kWarpSize, d = first + 2 * lane;
    const bool turns = first < half, mine = d < (turns ? half : shape.head_size);
    const Type rounding = rule_.squeezed ? Type::f32 : shape.rounding;
    const float* const queries =
        args_.tensors.queries +
        ((std::int64_t{unit_} * shape.tokens + query) * shape.group + 4 * quad) * shape.head_size;
    float2 low[4] = {}, high[4] = {};
#pragma unroll
    for (int head = 0; head < 4; ++head)
      if (mine && 4 * quad + head < shape.group) {
        const float* const q = queries + head * shape.head_size + d;
        low[head] = {rounded(q[0], rounding), rounded(q[1], rounding)};
        if (turns) high[head] = {rounded(q[half], rounding), rounded(q[half + 1], rounding)};
      }
    const std::uint32_t count = shared_.old;
    const std::int64_t keys = std::int64_t{unit_} * shape.tokens * shape.head_size;
    for (std::uint32_t base = 4 * (thread_ / kWarpSize); base < count; base += 4 * warps_) {
      float sums[16];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const std::uint32_t slot = old[min(base + n, count - 1)];
        const std::uint32_t position = positions_[slot];
        float2 a{}, b{};
        if (mine) {
          const std::int64_t at = keys + std::int64_t{position} * shape.head_size + d;
          a = load2(args_.tensors.keys, args_.tensors.type, at);
          if (turns) {
            b = load2(args_.tensors.keys, args_.tensors.type, at + half);
            const float4 turn = turn_of(rule_.squeezed ? places_[slot] : position, d);
            const float2 x = a, y = b;
            a = {rounded(x.x * turn.x - y.x * turn.y, rounding),
                 rounded(x.y * turn.z - y.y * turn.w, rounding)};
            b = {rounded(y.x * turn.x + x.x * turn.y, rounding),
                 rounded(y.y * turn.z + x.y * turn.w, rounding)};
          }
        }
#pragma unroll
        for (int head = 0; head < 4; ++head)
          sums[4 * n + head] =
              fmaf(low[head].x, a.x,
                   fmaf(low[head].y, a.y, fmaf(high[head].x, b.x, high[head].y * b.y)));
      }
      const float sum = fold16(sums) * shape.softmax_scale;
      if (lane < 16 && base + lane / 4 < count) {
        float& to = reinterpret_cast<float*>(own + quad * args_.caches.unit_slots +
                                             old[base + lane / 4])[lane % 4];
        to = first == 0 ? sum : to + sum;
      }
    }
  }

  /// cos and sin of dimensions d and d + 1 at a place: exact where keys are rounded, else of the
  /// place's multiple of 64 and of the rest, two small tables.
  __device__ float4 turn_of(std::uint32_t place, int d) const {
    const int half = args_.shape.rotated / 2;
    const auto at = [&](const float2* table, std::uint32_t row) {
      return *reinterpret_cast<const float4*>(table + std::int64_t{row} * half + d);
    };
    if (!rule_.squeezed) return at(args_.tensors.turns, place);
    const float4 a = at(args_.tensors.turns, place & ~63u), b = at(args_.tensors.fine, place & 63u);
    return {fmaf(a.x, b.x, -(a.y * b.y)), fmaf(a.x, b.y, a.y * b.x), fmaf(a.z, b.z, -(a.w * b.w)),
            fmaf(a.z, b.w, a.w * b.z)};
  }

  /// Lane l gets the sum over the warp of value l % 16.
  __device__ static float fold16(float (&values)[16]) {
    const unsigned lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int distance = 8; distance > 0; distance /= 2)
#pragma unroll
      for (int i = 0; i < distance; ++i) {
        const bool upper = lane & distance;
        const float kept = upper ? values[i + distance] : values[i],
                    sent = upper ? values[i] : values[i + distance];
        values[i] = kept + __shfl_xor_sync(~0u, sent, distance);
      }
    return values[0] + __shfl_xor_sync(~0u, values[0], 16);
  }

  /// Logits, of the shared row or the cache's own, to exponentials, the largest 1.
  __device__ void exponentiate(Quads (&held)[kHeld], const float4* logits, float4* own,
                               bool stores) {
    constexpr float kLowest = -3.4e38f;
    const unsigned lane = thread_ % kWarpSize;
    const auto logit = [&](std::uint32_t i) {
      Quads x;
      const bool is_own = is_old(i);
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad)
        x.quad[quad] = is_own ? own[quad * args_.caches.unit_slots + i]
                              : logits[quad * std::int64_t{args_.shape.tokens} + positions_[i]];
      return x;
    };
    Quads most;
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad)
      most.quad[quad] = {kLowest, kLowest, kLowest, kLowest};
    const auto raise = [&](const Quads& x) {
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        float4& m = most.quad[quad];
        const float4 y = x.quad[quad];
        m = {fmaxf(m.x, y.x), fmaxf(m.y, y.y), fmaxf(m.z, y.z), fmaxf(m.w, y.w)};
      }
    };
#pragma unroll
    for (int k = 0; k < kHeld; ++k)
      if (const std::uint32_t i = thread_ + k * threads_; i < visible_) raise(held[k] = logit(i));
    for (std::uint32_t i = thread_ + kHeld * threads_; i < visible_; i += threads_) raise(logit(i));
    parity_ ^= 1;
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      const float folded = warp_fold4(most.quad[quad], Larger{});
      if (lane < 4) shared_.folded[parity_][thread_ / kWarpSize][4 * quad + lane] = folded;
    }
    __syncthreads();
    float largest = kLowest;
    if (lane < kHeads)
      for (int warp = 0; warp < warps_; ++warp)
        largest = fmaxf(largest, shared_.folded[parity_][warp][lane]);
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) most.quad[quad] = of_lanes(largest, 4 * quad);
    const auto lower = [&](Quads& x) {
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        float4& y = x.quad[quad];
        const float4 m = most.quad[quad];
        y = {expf(y.x - m.x), expf(y.y - m.y), expf(y.z - m.z), expf(y.w - m.w)};
      }
    };
    const auto store = [&](std::uint32_t i, const Quads& x) {
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad)
        own[quad * args_.caches.unit_slots + i] = x.quad[quad];
    };
#pragma unroll
    for (int k = 0; k < kHeld; ++k)
      if (const std::uint32_t i = thread_ + k * threads_; i < visible_) {
        lower(held[k]);
        if (stores) store(i, held[k]);
      }
    for (std::uint32_t i = thread_ + kHeld * threads_; i < visible_; i += threads_) {
      Quads x = logit(i);
      lower(x);
      store(i, x);
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
      if (now_.tokens > 1) {
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
      ReplayLeaving mine;
      for_slots(held, [&](std::uint32_t i, const Quads& e) {
        Slot own = states_[i];
        P::observe(own, seen_by(e), params_, attended);
        states_[i] = own;
        if (ranks) mine = earlier(mine, leaving(i, own, leaves));
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
      for (std::uint32_t i = thread_; i < progress_.live; i += threads_) {
        Observation seen = args_.caches.seen[base_ + i];
        seen.queries = i < older ? now.tokens : now.tokens - (i - older);
        P::observe(states_[i], seen, params_, attended);
      }
    }
  }

  /// Whether one token leaves, for one to enter, when the next admission begins.
  __device__ bool ranks_next() const { return surplus() == 1 && next_.tokens == 1; }

  __device__ void rank_all(std::uint32_t now) {
    if (!ranks_next()) return;
    const Step leaves = step_at(now, 0);
    ReplayLeaving mine;
    for (std::uint32_t i = thread_; i < progress_.live; i += threads_)
      mine = earlier(mine, leaving(i, state(i), leaves));
    choose(mine);
  }
  __device__ static ReplayLeaving earlier(const ReplayLeaving& a, const ReplayLeaving& b) {
    return b < a ? b : a;
  }
  __device__ ReplayLeaving leaving(std::uint32_t i, const Slot& own, const Step& leaves) const {
    const Token token{positions_[i]};
    return {guards_.guard(token.position, leaves.now), P::rank(own, token, params_, leaves),
            token.position, i};
  }
  __device__ void choose(ReplayLeaving mine) {
    const unsigned lane = thread_ % kWarpSize;
    mine = warp_first(mine);
    first_parity_ ^= 1;
    if (lane == 0)
      shared_.first[first_parity_][thread_ / kWarpSize] = {
          static_cast<std::uint32_t>(mine.high >> 32), static_cast<std::uint32_t>(mine.high),
          mine.low, static_cast<std::uint32_t>(mine.slot)};
    __syncthreads();
    ReplayLeaving other;
    if (lane < warps_) {
      const uint4 packed = shared_.first[first_parity_][lane];
      other.high = std::uint64_t{packed.x} << 32 | packed.y;
      other.low = packed.z;
      other.slot = static_cast<std::int32_t>(packed.w);
    }
    other = warp_first(other);
    progress_.victim = other.slot + 1;
    progress_.victim_position = other.position();
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
    const std::int64_t values = std::int64_t{unit_} * shape.tokens * shape.head_size;
    float4 sums[kHeads] = {};
    if (d < shape.head_size)
#pragma unroll 4
      for (std::uint32_t slot = warp; slot < visible_; slot += warps_) {
        const Quads e = exponentials(slot);
        const float4 value = load4(args_.tensors.values, args_.tensors.type,
                                   values + std::int64_t{positions_[slot]} * shape.head_size + d);
#pragma unroll
        for (int head = 0; head < kHeads; ++head) {
          const float weight = component(e.quad[head / 4], head % 4);
          float4& sum = sums[head];
          sum.x = fmaf(weight, value.x, sum.x), sum.y = fmaf(weight, value.y, sum.y);
          sum.z = fmaf(weight, value.z, sum.z), sum.w = fmaf(weight, value.w, sum.w);
        }
      }
    for (int turn = 0; turn < warps_; ++turn) {
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

  /// Of the block of queries: kept sums become recalls, then a thread adds up each sum and head.
  __device__ void sum_figures() {
    const int group = args_.shape.group;
    const auto nll = reinterpret_cast<float(*)[kMostReplayGroup]>(&shared_.output[0][0]);
    for (int at = thread_; at < args_.rows.count * group; at += threads_) {
      const int i = at / group, head = at % group;
      if (args_.span.index[args_.rows.first + i] < 0) continue;
      float& kept = shared_.kept[i][head];
      std::uint32_t& hits = shared_.hits[i][head];
      if (kept < 0) {
        kept = 1;
        hits = wanted(i, head);
      } else {
        kept /= reinterpret_cast<const float*>(args_.rows.sums + row(i) * kQuads)[head];
      }
      nll[i][head] = static_cast<float>(-log(fmax(double{kept}, 1e-9)));
    }
    __syncthreads();
    const int head = thread_ % kMostReplayGroup, kind = thread_ / kMostReplayGroup;
    if (head >= group || kind > static_cast<int>(ReplaySum::wanted)) return;
    for (int i = 0; i < args_.rows.count; ++i) {
      const int index = args_.span.index[args_.rows.first + i];
      if (index < 0) continue;
      double value = shared_.kept[i][head];
      if (kind == 1) value = nll[i][head];
      if (kind == 2) value = wanted(i, head) - shared_.hits[i][head];
      if (kind == 3) value = wanted(i, head);
      sum_of(static_cast<ReplaySum>(kind), head, block_of(index)) += value;
    }
  }
  __device__ std::uint32_t wanted(int i, int head) const {
    return reinterpret_cast<const std::uint32_t*>(args_.rows.wanted + row(i) * kQuads)[head];
  }

  __device__ void note_kept(std::uint32_t query) const {
    std::uint32_t* const bits =
        args_.figures.kept + (figure() * args_.shape.tokens + query) * args_.figures.words;
    for (std::uint32_t i = thread_; i < visible_; i += threads_)
      atomicOr(bits + positions_[i] / 32, 1u << positions_[i] % 32);
  }

  const ReplayArgs& args_;
  ReplayShared& shared_;
  const int unit_, config_;
  const ReplayRule rule_;
  const Guards guards_;
  const std::uint32_t thread_, threads_, warps_;
  const std::int64_t base_;
  typename P::Params params_{};
  ReplayProgress progress_;
  ReplayAdmission now_, next_;
  std::uint32_t *positions_, *places_;
  Slot* states_;
  bool in_room_ = false;
  int parity_ = 0, first_parity_ = 0;
  std::uint32_t visible_ = 0;
  const float4* shared_row_ = nullptr;  // [quad, token]: of the query
  const float4* own_ = nullptr;         // [quad, slot]: where the shared row is of no use
};

/// A block for each member (x) and unit (y).
template <class P, int kQuads>
__global__ void __launch_bounds__(kReplayThreads, 2)
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
