// Decode attention of pairs whose slots lie in blocks: see pair_attention.cuh. Each instance is one
// of pair_attention.cu but for where tiles come from, so that outputs are the same bits.
#include "kernels/decode/pair_attention.cuh"

namespace kvlab::kernels {

cudaError_t paged_pair_attention(const PairAttention& args, const kvlab_pages& paged,
                                 cudaStream_t stream) {
  return with_warp<8>(
      args, [&]<class Warp>() { return launch_attention<Warp, true>(args, paged, stream); });
}

}  // namespace kvlab::kernels
