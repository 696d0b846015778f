// Decode attention over a cache with strides. All pairs have the same capacity, and all KV heads of
// a sequence have the same length. See pair_attention.cu.
#include "kernels/attention.hpp"
#include "kernels/decode/pair_attention.hpp"

namespace kvlab::kernels {
namespace {

/// If kv_heads does not divide query_heads, returns group 0, which pair_attention() refuses.
PairAttention pairs_of(const AttentionShape& shape, int sequences, int slots) {
  const bool divides = shape.kv_heads > 0 && shape.query_heads % shape.kv_heads == 0;
  const bool counts = sequences > 0 && sequences <= kMaxPairs;
  PairAttention pairs{};
  pairs.type = shape.type;
  pairs.group = divides ? shape.query_heads / shape.kv_heads : 0;
  pairs.head_size = shape.head_size;
  pairs.softmax_scale = shape.softmax_scale;
  pairs.sinks = shape.sinks;
  pairs.table = {.pairs = divides && counts ? sequences * shape.kv_heads : 0,
                 .kv_heads = shape.kv_heads,
                 .max_slots = slots,
                 .sequence_stride = shape.sequence_stride,
                 .head_stride = shape.head_stride};
  return pairs;
}

}  // namespace

std::size_t decode_attention_workspace(const AttentionShape& shape, int sequences, int slots) {
  return pair_attention_workspace(pairs_of(shape, sequences, slots));
}

cudaError_t decode_attention(const DecodeAttentionArgs& args, cudaStream_t stream) {
  PairAttention pairs = pairs_of(args.shape, args.sequences, args.slots);
  pairs.table.lengths = args.lengths;
  pairs.q = args.q;
  pairs.keys = args.keys;
  pairs.values = args.values;
  pairs.out = args.out;
  pairs.lse = args.lse;
  pairs.settled = args.settled;
  pairs.workspace = args.workspace;
  return pair_attention(pairs, {}, stream);
}

}  // namespace kvlab::kernels
