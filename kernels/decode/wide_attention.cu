// Decode attention of pairs with more than eight query heads: see pair_attention.cuh. What is read
// of a tile serves both eights. Instantiated: 3 types x 4 head sizes x 3 ways to number positions,
// with tiles sent for one by one (36 kernels).
#include "kernels/decode/pair_attention.cuh"

namespace kvlab::kernels {

cudaError_t wide_pair_attention(const PairAttention& args, cudaStream_t stream) {
  return with_warp<16>(
      args, [&]<class Warp>() { return launch_attention<Warp, false>(args, {}, stream); });
}

}  // namespace kvlab::kernels
