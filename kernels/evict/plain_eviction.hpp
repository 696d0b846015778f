// The part of plain eviction that is the same for every policy: attention over a pair's live slots,
// and the probabilities of each.
#pragma once

#include "kernels/evict/eviction.hpp"

namespace kvlab::kernels {

inline constexpr int kEvictThreads = 256;

/// What plain_attention leaves in the workspace.
struct PlainRows {
  float* p;        // [sequence, query_head, most_slots]: logits, then probabilities
  float* largest;  // [sequence, query_head]: the largest probability
};
PlainRows plain_rows(const SlotCache& cache, void* workspace);
std::size_t plain_workspace(const SlotCache& cache);

/// Two launches: logits of every live slot, then each row's softmax and output.
cudaError_t plain_attention(const EvictingAttentionArgs& args, cudaStream_t stream);

}  // namespace kvlab::kernels
