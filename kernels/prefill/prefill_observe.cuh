// Code for the kernels of prefill_observe.cu and prefill_observe_hopper.cu. The former file
// explains what they compute.
#pragma once

#include "kernels/device/mass_sum.hpp"
#include "kernels/evict/append.hpp"
#include "kernels/prefill/prefill_rows.cuh"

namespace kvlab::kernels::observe {

inline constexpr int kQueries = 64;  ///< queries per tile, all of one query head
inline constexpr int kRange = 1024;  ///< maximum number of queries per CTA

/// What a kernel sums for each key. mass: the probabilities. weighted: the probabilities times the
/// weight of the query. largest: for each query, only the largest probability among the heads of
/// the group, times the weight of the query. requests: the number of queries that request the key,
/// and the last of these queries.
enum class Count { mass, weighted, largest, requests };

/// What a kernel needs to know about a row (one query of one query head) besides the products.
struct alignas(8) RowTerm {
  float minus_lse2;  ///< minus the row's log-sum-exp in base 2; -infinity: the row is not counted
  float bound;  ///< for requests: the lowest probability that is a request; otherwise: the query's
                ///< weight
};

struct Plan {
  kvlab_observe_args args;
  std::uint32_t tail;
  int group;
  int counted;        ///< upper limit of the number of counted queries of any sequence
  int padded;         ///< terms per query head; the queries of each sequence are rounded up to
                      ///< kQueries
  float base2_scale;  ///< softmax scale, for base-2 logits
  RowTerm* terms;     // [query_head, padded]
};

/// The probability of a key that the query does not see. It is 0 in sums. For requests it is
/// -infinity, because 0 can be a request.
template <Count kCount>
inline constexpr float kUnseen = kCount == Count::requests ? -INFINITY : 0;

/// The statistics of one key, over the queries that one lane handles.
template <Count kCount>
class KeyCount {
 public:
  /// Adds probability `p` of a query of the current tile. `bit` is the query's number among those
  /// that this lane handles in a tile, from the oldest on.
  __device__ void add(float p, const RowTerm& term, int bit) {
    if constexpr (kCount == Count::mass) {
      sum_.add(p);
    } else if constexpr (kCount == Count::weighted) {
      mass_ += fixed_mass(term.bound, p);
    } else if constexpr (kCount == Count::largest) {
      largest_[bit] = fmaxf(largest_[bit], p);
    } else {
      if (p >= term.bound) requested_ |= 1u << bit;
    }
  }
  /// Call it when a tile's queries have been added for all query heads of the group. query_of(bit)
  /// converts the lane's query number to the query number within the tile. `terms` may be those of
  /// any head, because only weights are read, and these are equal for all heads.
  template <class QueryOf>
  __device__ void end_queries(int first_query, const RowTerm* terms, QueryOf query_of) {
    if constexpr (kCount == Count::largest) {
#pragma unroll
      for (int bit = 0; bit < kQueriesOfLane; ++bit) {
        mass_ += fixed_mass(terms[query_of(bit)].bound, largest_[bit]);
        largest_[bit] = 0;
      }
    }
    if constexpr (kCount == Count::requests) {
      if (requested_ == 0) return;
      requests_ += __popc(requested_);
      last_ = max(last_, first_query + query_of(31 - __clz(static_cast<int>(requested_))));
      requested_ = 0;
    }
  }
  /// Combines the statistics of the lanes whose numbers differ only in the bits of `lanes` (a power
  /// of two minus one). Each of these lanes gets the result. `added`: the number of calls of add()
  /// in each lane.
  __device__ void reduce(std::uint32_t added, int lanes) {
    if constexpr (kCount == Count::mass) mass_ = sum_.total(added);
    for (int step = 1; step <= lanes; step *= 2) {
      mass_ += __shfl_xor_sync(~0u, mass_, step);
      requests_ += __shfl_xor_sync(~0u, requests_, step);
      last_ = max(last_, __shfl_xor_sync(~0u, last_, step));
    }
  }
  __device__ void add_to(kvlab_observation& seen, std::uint32_t first_position) const {
    if constexpr (kCount == Count::requests) {
      if (requests_ == 0) return;
      atomicAdd(&seen.requests, requests_);
      atomicMax(&seen.last_request, first_position + static_cast<std::uint32_t>(last_));
    } else {
      static_assert(sizeof(unsigned long long) == sizeof seen.mass);
      atomicAdd(reinterpret_cast<unsigned long long*>(&seen.mass), mass_);
    }
  }

 private:
  MassSum sum_;
  unsigned long long mass_ = 0;
  static constexpr int kQueriesOfLane = kQueries / 4;
  /// For each of the lane's queries of the current tile: the largest probability among the heads so
  /// far.
  float largest_[kCount == Count::largest ? kQueriesOfLane : 1] = {};
  std::uint32_t requested_ = 0, requests_ = 0;
  int last_ = 0;  ///< the last query that requested the key
};

/// The number, within a tile, of the query that this lane counts as bit `bit` (0 to 15). This is
/// the layout of tensor-core products.
__device__ inline int query_of_bit(int bit) {
  return bit / 2 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + bit % 2;
}

/// The sequence that a CTA handles.
struct Sequence : OwnQueries {
  int younger;  ///< number of the prompt's queries after those of this call
  int silent;   ///< number of queries at the beginning that are skipped, because they are not
                ///< counted; rounded down to a multiple of kQueries
  int term;     ///< index of the sequence's first term among a head's terms

  __device__ Sequence(const kvlab_observe_args& args, std::uint32_t tail)
      : OwnQueries(counted_queries(args)),
        younger(args.youngers == nullptr ? args.younger : args.youngers[sequence]),
        silent(static_cast<int>(max(std::int64_t{younger} + count - tail, std::int64_t{0})) /
               kQueries * kQueries),
        term((begin / kQueries + sequence) * kQueries) {}

 private:
  /// The sequence's queries. If args.appended is given, only its first appended[sequence] queries.
  __device__ static OwnQueries counted_queries(const kvlab_observe_args& args) {
    OwnQueries own(args.prefill);
    if (args.appended != nullptr)
      own.count = min(own.count, static_cast<int>(args.appended[own.sequence]));
    return own;
  }
};

/// The keys and queries of a CTA. Consecutive CTAs have consecutive blocks of keys and the same
/// queries. CTAs that run at the same time therefore find these queries in the L2 cache.
struct Part {
  Sequence own;
  int kv_head, pair;
  int first;      ///< slot of query 0
  int first_key;  ///< slot of the CTA's first key
  int keys;       ///< number of keys of the CTA, without those beyond the last key
  /// The range of queries that the CTA passes over; `begin` is a multiple of kQueries. If end <=
  /// begin, the CTA has nothing to do.
  int begin, end;

  __device__ Part(const Plan& plan, int keys_of_cta) : own(plan.args, plan.tail) {
    const int blocks = (plan.args.keys_end + keys_of_cta - 1) / keys_of_cta;
    const int block = static_cast<int>(blockIdx.x) % blocks;
    const int rest = static_cast<int>(blockIdx.x) / blocks;
    kv_head = rest % plan.args.prefill.kv_heads;
    pair = own.sequence * plan.args.prefill.kv_heads + kv_head;
    first = first_query_slot(plan.args.prefill, pair);
    first_key = block * keys_of_cta;
    keys = min(keys_of_cta, first + own.count - first_key);
    begin = own.silent + rest / plan.args.prefill.kv_heads * kRange;
    end = min(begin + kRange, own.count);
    // Queries before this one see none of the keys.
    begin = max(begin, (first_key - first) / kQueries * kQueries);
    if (keys <= 0) end = begin;
  }
  /// The index of the first element of the CTA's key `i`.
  __device__ std::int64_t key_row(const kvlab_observe_args& args, int i) const {
    return args.prefill.pages.blocks ? paged_row(args.prefill, pair, first_key + i)
                                     : (key_index(args) + i) * args.prefill.head_size;
  }
  /// The index of the CTA's first key among all slots, which is also its index among the
  /// observations.
  __device__ std::int64_t key_index(const kvlab_observe_args& args) const {
    return args.prefill.first_slot[pair] + first_key;
  }
  __device__ std::uint32_t position(const kvlab_observe_args& args) const {
    return args.positions == nullptr ? args.position : args.positions[own.sequence];
  }
  /// The terms of one query head, from query `query` on.
  __device__ const RowTerm* terms(const Plan& plan, int head, int query) const {
    return plan.terms + std::int64_t{head} * plan.padded + own.term + query;
  }
};

/// The grid: x is the number of blocks of keys times KV heads times ranges of queries, y the number
/// of sequences.
inline dim3 grid(const Plan& plan, int keys_of_cta) {
  const int blocks = (plan.args.keys_end + keys_of_cta - 1) / keys_of_cta;
  const int ranges = (plan.counted + kRange - 1) / kRange;
  return dim3(static_cast<unsigned>(blocks) * ranges * plan.args.prefill.kv_heads,
              static_cast<unsigned>(sequences_of(plan.args.prefill)));
}

/// Whether the driver loaded code for sm_90a, which observe_on_hopper() requires.
bool has_hopper_code();
/// Launches the kernels for compute capability 9.0 and a 2-byte type.
cudaError_t observe_on_hopper(const Plan& plan, Count count, cudaStream_t stream);

}  // namespace kvlab::kernels::observe
