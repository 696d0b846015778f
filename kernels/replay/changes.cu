// The errors of sampled outputs by the gradients of their query: what they change of the
// log-likelihood of drawn tokens.
#include "kernels/device/fold.cuh"
#include "kernels/replay/replay.hpp"

namespace kvlab::kernels {
namespace {

constexpr int kWarps = 8;  // of a block, each with one configuration

/// A block for each query (x), some configurations (y) and unit (z).
__global__ void __launch_bounds__(kWarps* kWarpSize)
    changes_kernel(const __grid_constant__ ReplayArgs args) {
  const int index = args.span.index[args.rows.first + static_cast<int>(blockIdx.x)],
            every = args.span.sample_every, unit = static_cast<int>(blockIdx.z),
            config = static_cast<int>(blockIdx.y * kWarps + threadIdx.x / kWarpSize),
            lane = static_cast<int>(threadIdx.x % kWarpSize);
  if (index < 0 || index % every != 0 || config >= args.figures.configs) return;
  const int width = args.shape.group * args.shape.head_size, draws = args.samples.draws;
  const std::int64_t figure = args.figure_of(unit, config),
                     sample =
                         figure * args.samples.capacity + index / every % args.samples.capacity;
  const float* const errors = args.samples.own + sample * width;
  const float* gradient =
      args.samples.gradients +
      (std::int64_t{unit} * args.figures.samples + index / every) * draws * width;
  for (int draw = 0; draw < draws; ++draw, gradient += width) {
    float sum = 0;
    for (int d = lane; d < width; d += kWarpSize) sum = fmaf(errors[d], gradient[d], sum);
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2)
      sum += __shfl_xor_sync(~0u, sum, distance);
    if (lane == 0) args.samples.changes[sample * draws + draw] = sum;
  }
}

}  // namespace

cudaError_t replay_changes(const ReplayArgs& args, cudaStream_t stream) {
  if (args.rows.count < 1 || args.figures.configs < 1 || args.shape.units < 1 ||
      args.shape.units > 65535)
    return cudaErrorInvalidValue;
  const dim3 blocks(static_cast<unsigned>(args.rows.count),
                    static_cast<unsigned>((args.figures.configs + kWarps - 1) / kWarps),
                    static_cast<unsigned>(args.shape.units));
  changes_kernel<<<blocks, kWarps * kWarpSize, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace kvlab::kernels
