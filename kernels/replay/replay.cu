// Launching a policy's walk.
#include <algorithm>

#include "kernels/launch.cuh"
#include "kernels/replay/walk.cuh"

namespace kvlab::kernels {
namespace {

/// How a walk is launched.
struct Plan {
  const void* kernel;
  dim3 grid;
  unsigned threads;
  std::size_t shared_bytes;
  int multiprocessors;
};

cudaError_t plan_walk(const ReplayPolicy& policy, const ReplayArgs& args, Plan& plan) {
  const ReplayShape& shape = args.shape;
  if (shape.group < 1 || shape.group > kMostReplayGroup || shape.head_size < 8 ||
      shape.head_size > kMostReplayHeadSize || shape.head_size % 8 != 0 || shape.rotated % 4 != 0 ||
      args.rows.count < 1 || args.rows.count > kMostReplayQueries ||
      args.span.blocks > kReplaySpanBlocks || args.member_count < 1 || shape.units < 1 ||
      shape.units > 65535 || (args.squeezed && shape.tokens > kMostOldDistance))
    return cudaErrorInvalidValue;
  DeviceLimits limits;
  if (const cudaError_t error = device_limits(limits); error != cudaSuccess) return error;
  plan.grid = dim3(static_cast<unsigned>(args.member_count), static_cast<unsigned>(shape.units));
  plan.threads = replay_threads(args.room_slots, args.squeezed);
  plan.multiprocessors = limits.multiprocessors;
  constexpr int kReserved = 1024;
  const int most = limits.shared_bytes - static_cast<int>(sizeof(ReplayShared)) - kReserved;
  plan.shared_bytes = bytes_of_words(args);
  const std::size_t room =
      replay_room(whole_strips(args.room_slots, args.squeezed), policy.slot_bytes, args.squeezed);
  const auto take = [&](std::size_t bytes) {
    const bool fits = plan.shared_bytes + bytes <= static_cast<std::size_t>(most);
    if (fits) plan.shared_bytes += bytes;
    return fits;
  };
  const bool fits = take(room_of_old_keys(args)), in_room = take(room);
  if (!fits || plan.shared_bytes > static_cast<std::size_t>(most)) return cudaErrorInvalidValue;
  plan.kernel = policy.kernels[shape.quads() - 1][args.squeezed][in_room];
  return cudaFuncSetAttribute(plan.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
}

}  // namespace

cudaError_t ReplayPolicy::walk(const ReplayArgs& args, cudaStream_t stream) const {
  Plan plan{};
  if (const cudaError_t error = plan_walk(*this, args, plan); error != cudaSuccess) return error;
  void* parameters[] = {const_cast<ReplayArgs*>(&args)};
  return cudaLaunchKernel(plan.kernel, plan.grid, dim3(plan.threads), parameters, plan.shared_bytes,
                          stream);
}

cudaError_t ReplayPolicy::waves(const ReplayArgs& args, int& waves) const {
  Plan plan{};
  cudaError_t error = plan_walk(*this, args, plan);
  int resident = 0;
  if (error == cudaSuccess)
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        &resident, plan.kernel, static_cast<int>(plan.threads), plan.shared_bytes);
  if (error != cudaSuccess) return error;
  const int at_once = resident * plan.multiprocessors,
            blocks = static_cast<int>(plan.grid.x * plan.grid.y);
  waves = (blocks + at_once - 1) / at_once;
  return cudaSuccess;
}

}  // namespace kvlab::kernels
