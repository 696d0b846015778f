// The rows of prefill attention: the queries of one KV head's query heads, packed.
#pragma once

#include "kernels/attention.hpp"

namespace kvlab::kernels {

/// Row r is query r / group of query head r % group of the KV head: the rows of a tile share their
/// keys, and a tile spans few positions, whatever the group.
struct PrefillRows {
  const PrefillAttentionArgs& args;
  int group;
  int kv_head;

  __device__ int count() const { return args.queries * group; }
  __device__ int position(int row) const { return args.first + row / group; }
  /// Index of the row's query head among [query, query_head].
  __device__ std::int64_t head(int row) const {
    return std::int64_t{row / group} * args.shape.query_heads + kv_head * group + row % group;
  }
};

}  // namespace kvlab::kernels
