// Decode attention for pairs whose slots are in pages (blocks of slots). See pair_attention.cuh.
// Each instance differs from the one in pair_attention.cu only in the addresses from which tiles
// are loaded, so outputs are equal bit for bit.
#include "kernels/decode/pair_attention.cuh"

namespace kvlab::kernels {

cudaError_t paged_pair_attention(const PairAttention& args, const kvlab_pages& paged,
                                 cudaStream_t stream) {
  return with_warp<8>(
      args, [&]<class Warp>() { return launch_attention<Warp, true>(args, paged, stream); });
}

}  // namespace kvlab::kernels
