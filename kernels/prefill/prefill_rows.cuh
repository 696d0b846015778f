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
  constexpr int kMostGroup = 8;
  if (shape.query_heads / shape.kv_heads > kMostGroup) return false;
  if (shape.head_stride % (16 / static_cast<std::int64_t>(bytes_of(shape.type))) != 0) return false;
  constexpr int kMostPosition = 1 << 27;  // so that eight times as many rows can be counted
  if (args.first < 0 || args.first >= kMostPosition) return false;
  if (args.queries < 1 || args.queries >= kMostPosition) return false;
  if (!can_page(args.paged, shape.head_size, std::int64_t{args.first} + args.queries,
                bytes_of(shape.type)))
    return false;
  constexpr std::int64_t kMostCtas = (std::int64_t{1} << 31) - 1;
  return std::int64_t{args.queries} * shape.query_heads < kMostCtas;
}

/// The element at which a KV head's keys (and values) begin.
template <class Args>
__device__ inline std::int64_t head_begin(const Args& args, int kv_head) {
  return args.first_slot == nullptr ? kv_head * args.shape.head_stride
                                    : args.first_slot[kv_head] * args.shape.head_size;
}

/// The element at which a slot of a KV head begins, where there are blocks.
template <class Args>
__device__ inline std::int64_t paged_row(const Args& args, int kv_head, int slot) {
  return args.paged.row(kv_head, args.shape.kv_heads, slot);
}

/// The slot of a KV head's first query.
template <class Args>
__device__ inline int first_query_slot(const Args& args, int kv_head) {
  return args.first + (args.older == nullptr ? 0 : args.older[kv_head]);
}

/// Row r is query r / group of query head r % group of the KV head: the rows of a tile share their
/// keys, and a tile spans few slots, whatever the group.
struct PrefillRows {
  const PrefillAttentionArgs& args;
  int group;
  int kv_head;
  int first;  ///< slot of the first query

  __device__ int count() const { return args.queries * group; }
  __device__ int slot(int row) const { return first + row / group; }
  /// Index of the row's query head among [query, query_head].
  __device__ std::int64_t head(int row) const {
    return std::int64_t{row / group} * args.shape.query_heads + kv_head * group + row % group;
  }
};

}  // namespace kvlab::kernels
