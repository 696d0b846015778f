// The rows of prefill attention: the queries of one KV head's query heads, packed.
#pragma once

#include "kernels/attention.hpp"

namespace kvlab::kernels {

/// Whether shape, first and queries are ones that the kernels take. `args`: PrefillAttentionArgs or
/// ObserveArgs, as below.
template <class Args>
bool can_prefill(const Args& args) {
  const AttentionShape& shape = args.shape;
  if (shape.kv_heads < 1 || shape.query_heads < 1 || shape.query_heads % shape.kv_heads != 0)
    return false;
  constexpr int kMostGroup = 16;
  if (shape.query_heads / shape.kv_heads > kMostGroup || !is_head_size(shape.head_size))
    return false;
  if (shape.head_stride % (16 / static_cast<std::int64_t>(bytes_of(shape.type))) != 0) return false;
  constexpr int kMostPosition = 1 << 26;  // so that sixteen times as many rows can be counted
  if (args.first < 0 || args.first >= kMostPosition) return false;
  if (args.queries < 1 || args.queries >= kMostPosition) return false;
  const QueryBatch& batch = args.batch;
  constexpr int kMostSequences = 65535;  // of a grid's second dimension
  if (batch.first == nullptr
          ? batch.sequences != 1 || batch.all != 0
          : batch.sequences < 1 || batch.sequences > kMostSequences || batch.all < args.queries ||
                batch.all >= kMostPosition || args.first_slot == nullptr)
    return false;
  if (!can_page(args.paged, shape.head_size, std::int64_t{args.first} + args.queries,
                bytes_of(shape.type)))
    return false;
  constexpr std::int64_t kMostCtas = (std::int64_t{1} << 31) - 1;
  return std::int64_t{args.queries} * shape.query_heads < kMostCtas;
}

/// The queries of a CTA's sequence, which is blockIdx.y.
struct OwnQueries {
  int sequence = static_cast<int>(blockIdx.y);
  int begin = 0;  ///< its first, of all
  int count;

  template <class Args>
  __device__ explicit OwnQueries(const Args& args) : count(args.queries) {
    if (args.batch.first == nullptr) return;
    begin = args.batch.first[sequence];
    count = args.batch.first[sequence + 1] - begin;
  }
};

/// The element at which a pair's keys (and values) begin.
template <class Args>
__device__ inline std::int64_t pair_begin(const Args& args, int pair) {
  return args.first_slot == nullptr ? pair * args.shape.head_stride
                                    : args.first_slot[pair] * args.shape.head_size;
}

/// The element at which a slot of a pair begins, where there are blocks.
template <class Args>
__device__ inline std::int64_t paged_row(const Args& args, int pair, int slot) {
  return args.paged.row(pair, args.shape.kv_heads, slot);
}

/// The slot of a pair's first query.
template <class Args>
__device__ inline int first_query_slot(const Args& args, int pair) {
  return args.first + (args.older == nullptr ? 0 : args.older[pair]);
}

/// Row r is query r / group of query head r % group of the KV head: the rows of a tile share their
/// keys, and a tile spans few slots, whatever the group.
struct PrefillRows {
  const PrefillAttentionArgs& args;
  int group;
  int kv_head;
  OwnQueries own;
  int pair = own.sequence * args.shape.kv_heads + kv_head;
  int first = first_query_slot(args, pair);  ///< slot of the first query

  __device__ int count() const { return own.count * group; }
  __device__ int slot(int row) const { return first + row / group; }
  /// The first slot that a row sees.
  __device__ int first_seen(int row) const {
    return args.span == 0 ? 0 : max(slot(row) + 1 - args.span, 0);
  }
  /// Index of the row's query head among [query, query_head].
  __device__ std::int64_t head(int row) const {
    return std::int64_t{own.begin + row / group} * args.shape.query_heads + kv_head * group +
           row % group;
  }
};

}  // namespace kvlab::kernels
