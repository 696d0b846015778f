// Decode attention for pairs with more than eight query heads: see pair_attention.cuh. Each tile is
// read only once, for both groups of up to eight heads. Instantiated for 3 types x 4 head sizes x 3
// position numberings, with tiles requested one by one (36 kernels).
#include "kernels/decode/pair_attention.cuh"

namespace kvlab::kernels {

cudaError_t wide_pair_attention(const PairAttention& args, cudaStream_t stream) {
  return with_warp<16>(
      args, [&]<class Warp>() { return launch_attention<Warp, false>(args, {}, stream); });
}

}  // namespace kvlab::kernels
