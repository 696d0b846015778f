// The rows of prefill attention. A row is one query of one query head; a tile's rows belong to the
// query heads of one KV head. A pair is a KV head of a sequence.
#pragma once

#include <algorithm>

#include "kernels/attention.hpp"
#include "kernels/paged_row.cuh"

namespace kvlab::kernels {

inline int sequences_of(const kvlab_prefill_args& args) { return std::max(args.sequences, 1); }
/// The total number of queries over all sequences.
inline int queries_of(const kvlab_prefill_args& args) {
  return args.sequences == 0 ? args.queries : args.all_queries;
}

/// Whether the kernels support the arguments' shape, `first` and number of queries.
inline bool can_prefill(const kvlab_prefill_args& args) {
  if (args.kv_heads < 1 || args.query_heads < 1 || args.query_heads % args.kv_heads != 0)
    return false;
  constexpr int kMaxGroup = 16;
  if (args.query_heads / args.kv_heads > kMaxGroup || !is_head_size(args.head_size)) return false;
  constexpr int kMaxPosition = 1 << 26;  // with kMaxGroup = 16 rows per position, row numbers stay
                                         // below 2^30 and do not overflow
  if (args.first < 0 || args.first >= kMaxPosition) return false;
  if (args.queries < 1 || args.queries >= kMaxPosition) return false;
  constexpr int kMaxSequences = 65535;  // limit of the grid's second dimension
  if ((args.sequences == 0) != (args.first_query == nullptr)) return false;
  if (args.sequences != 0 &&
      (args.sequences < 0 || args.sequences > kMaxSequences || args.all_queries < args.queries ||
       args.all_queries >= kMaxPosition || args.first_slot == nullptr))
    return false;
  constexpr std::int64_t kMaxCtas = (std::int64_t{1} << 31) - 1;
  return std::int64_t{args.queries} * args.query_heads < kMaxCtas;
}

/// The queries of the sequence that the CTA handles, which is sequence blockIdx.y.
struct OwnQueries {
  int sequence = static_cast<int>(blockIdx.y);
  int begin = 0;  ///< the sequence's first query, among all queries
  int count;

  __device__ explicit OwnQueries(const kvlab_prefill_args& args) : count(args.queries) {
    if (args.first_query == nullptr) return;
    begin = args.first_query[sequence];
    count = args.first_query[sequence + 1] - begin;
  }
};

/// The index of the first element of a pair's slot in paged memory.
__device__ inline std::int64_t paged_row(const kvlab_prefill_args& args, int pair, int slot) {
  return paged_row(args.pages, pair, args.kv_heads, slot);
}

/// The slot of a pair's first query.
__device__ inline int first_query_slot(const kvlab_prefill_args& args, int pair) {
  return args.first + (args.older == nullptr ? 0 : args.older[pair]);
}

/// Row r is query r / group of query head r % group of the KV head. So all rows of a tile use the
/// same keys, and neighbouring rows belong to the same query or to neighbouring queries, which see
/// almost the same keys.
struct PrefillRows {
  const kvlab_prefill_args& args;
  const PrefillLayer& layer;
  int group;
  int kv_head;
  OwnQueries own;
  int pair = own.sequence * args.kv_heads + kv_head;
  int first = first_query_slot(args, pair);  ///< slot of the first query

  __device__ int count() const { return own.count * group; }
  __device__ int slot(int row) const { return first + row / group; }
  /// The first slot that a row sees.
  __device__ int first_seen(int row) const {
    return layer.window == 0 ? 0 : max(slot(row) + 1 - layer.window, 0);
  }
  /// The index of the first element of the pair's keys (and values).
  __device__ std::int64_t begin() const {
    return args.first_slot == nullptr ? pair * layer.head_stride
                                      : args.first_slot[pair] * args.head_size;
  }
  /// The index of the row's query head in [query, query_head].
  __device__ std::int64_t head(int row) const {
    return std::int64_t{own.begin + row / group} * args.query_heads + kv_head * group + row % group;
  }
};

}  // namespace kvlab::kernels
