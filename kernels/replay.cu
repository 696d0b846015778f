// Launching a policy's walk.
#include "kernels/launch.cuh"
#include "kernels/replay_walk.cuh"

namespace kvlab::kernels {
namespace {

/// How a walk is launched.
struct Plan {
  const void* kernel;
  dim3 grid;
  unsigned threads;
  std::size_t room;  ///< bytes of shared memory for a cache's slots; 0: they stay in global memory
  int multiprocessors;
};

cudaError_t plan_walk(const ReplayPolicy& policy, const ReplayArgs& args, Plan& plan) {
  const ReplayShape& shape = args.shape;
  if (shape.group < 1 || shape.group > kMostReplayGroup || shape.head_size < 8 ||
      shape.head_size > kMostReplayHeadSize || shape.head_size % 8 != 0 || shape.rotated % 4 != 0 ||
      args.rows.count < 1 || args.rows.count > kMostReplayQueries ||
      args.span.blocks > kReplaySpanBlocks || args.member_count < 1 || shape.units < 1 ||
      shape.units > 65535)
    return cudaErrorInvalidValue;
  DeviceLimits limits;
  if (const cudaError_t error = device_limits(limits); error != cudaSuccess) return error;
  const unsigned held = kReplayHeld / static_cast<unsigned>(shape.quads());
  plan.kernel = policy.kernels[shape.quads() - 1];
  plan.grid = dim3(static_cast<unsigned>(args.member_count), static_cast<unsigned>(shape.units));
  plan.threads = args.room_slots > held * kReplayThreads / 2 ? kReplayThreads : kReplayThreads / 2;
  plan.room = replay_room(args.room_slots, policy.slot_bytes);
  plan.multiprocessors = limits.multiprocessors;
  constexpr std::size_t kReserved = 1024;
  if (plan.room + sizeof(ReplayShared) + kReserved > std::size_t(limits.shared_bytes))
    plan.room = 0;
  return cudaFuncSetAttribute(
      plan.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
      limits.shared_bytes - static_cast<int>(sizeof(ReplayShared)) - static_cast<int>(kReserved));
}

}  // namespace

cudaError_t ReplayPolicy::walk(const ReplayArgs& args, cudaStream_t stream) const {
  Plan plan{};
  if (const cudaError_t error = plan_walk(*this, args, plan); error != cudaSuccess) return error;
  ReplayArgs copy = args;
  bool in_room = plan.room > 0;
  void* parameters[] = {&copy, &in_room};
  return cudaLaunchKernel(plan.kernel, plan.grid, dim3(plan.threads), parameters, plan.room,
                          stream);
}

cudaError_t ReplayPolicy::waves(const ReplayArgs& args, int& waves) const {
  Plan plan{};
  cudaError_t error = plan_walk(*this, args, plan);
  int resident = 0;
  if (error == cudaSuccess)
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        &resident, plan.kernel, static_cast<int>(plan.threads), plan.room);
  if (error != cudaSuccess) return error;
  const int at_once = resident * plan.multiprocessors,
            blocks = static_cast<int>(plan.grid.x * plan.grid.y);
  waves = (blocks + at_once - 1) / at_once;
  return cudaSuccess;
}

}  // namespace kvlab::kernels
