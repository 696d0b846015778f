// Launching a policy's walk.
#include <algorithm>

#include "kernels/launch.cuh"
#include "kernels/replay/old_keys.cuh"
#include "kernels/replay/rungs.cuh"

namespace kvlab::kernels {
namespace {

/// How a walk is launched.
struct Plan {
  WalkVariant variant;
  dim3 grid;
  unsigned threads;
  std::size_t shared_bytes, most_shared_bytes;
  int multiprocessors;
};

cudaError_t plan_walk(const ReplayArgs& args, Plan& plan) {
  const ReplayShape& shape = args.shape;
  if (shape.group < 1 || shape.group > kMostReplayGroup || shape.head_size < 8 ||
      shape.head_size > kMostReplayHeadSize || shape.head_size % 8 != 0 || shape.rotated % 4 != 0 ||
      args.rows.count < 1 || args.rows.count > kMostReplayQueries ||
      args.span.blocks > static_cast<int>(kSpanBlocks) || args.layer_heads > kMostLayerHeads ||
      (args.layer_heads && args.units_of_config() % args.layer_heads != 0) ||
      args.member_count < 1 || shape.units < 1 || shape.units > 65535 ||
      (args.squeezed && shape.tokens > kMostOldDistance) || args.most_rungs > kMostReplayRungs ||
      (args.squeezed && args.most_rungs > 0))
    return cudaErrorInvalidValue;
  DeviceLimits limits;
  if (const cudaError_t error = device_limits(limits); error != cudaSuccess) return error;
  plan.grid =
      dim3(static_cast<unsigned>(args.member_count), static_cast<unsigned>(args.units_of_config()));
  plan.threads = replay_threads(args.room_slots, args.squeezed);
  plan.multiprocessors = limits.multiprocessors;
  constexpr int kReserved = 1024;
  const bool rungs = args.most_rungs > 0;
  const int most = limits.shared_bytes - static_cast<int>(sizeof(ReplayShared)) - kReserved -
                   (rungs ? static_cast<int>(sizeof(LadderShared)) : 0);
  plan.shared_bytes = bytes_of_words(args) * static_cast<std::size_t>(1 + args.most_rungs);
  const std::size_t room = replay_room(whole_strips(args.room_slots, args.squeezed),
                                       args.slot_bytes, args.squeezed, rungs);
  const auto take = [&](std::size_t bytes) {
    const bool fits = plan.shared_bytes + bytes <= static_cast<std::size_t>(most);
    if (fits) plan.shared_bytes += bytes;
    return fits;
  };
  const bool fits = take(room_of_old_keys(args)), in_room = take(room);
  if (!fits || plan.shared_bytes > static_cast<std::size_t>(most)) return cudaErrorInvalidValue;
  plan.most_shared_bytes = static_cast<std::size_t>(most);
  plan.variant = {shape.quads(), args.squeezed, in_room, args.tensors.type, args.largest, rungs};
  return cudaSuccess;
}

/// The plan, with a kernel that may have its shared memory.
cudaError_t plan_walk(const void* kernel, const ReplayArgs& args, Plan& plan) {
  if (const cudaError_t error = plan_walk(args, plan); error != cudaSuccess) return error;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(plan.most_shared_bytes));
}

}  // namespace

cudaError_t walk_variant(const ReplayArgs& args, WalkVariant& variant) {
  Plan plan{};
  const cudaError_t error = plan_walk(args, plan);
  variant = plan.variant;
  return error;
}

cudaError_t replay_walk(const void* kernel, const ReplayArgs& args, cudaStream_t stream) {
  Plan plan{};
  if (const cudaError_t error = plan_walk(kernel, args, plan); error != cudaSuccess) return error;
  void* parameters[] = {const_cast<ReplayArgs*>(&args)};
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {1, static_cast<unsigned>(args.layer_heads), 1};
  cudaLaunchConfig_t config{};
  config.gridDim = plan.grid;
  config.blockDim = dim3(plan.threads);
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = args.layer_heads ? 1 : 0;
  return cudaLaunchKernelExC(&config, kernel, parameters);
}

cudaError_t replay_waves(const void* kernel, const ReplayArgs& args, int& waves) {
  Plan plan{};
  cudaError_t error = plan_walk(kernel, args, plan);
  int resident = 0;
  if (error == cudaSuccess)
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        &resident, kernel, static_cast<int>(plan.threads), plan.shared_bytes);
  if (error != cudaSuccess) return error;
  const int at_once = resident * plan.multiprocessors,
            blocks = static_cast<int>(plan.grid.x * plan.grid.y);
  waves = (blocks + at_once - 1) / at_once;
  return cudaSuccess;
}

}  // namespace kvlab::kernels
