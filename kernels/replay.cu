#include <algorithm>

#include "kernels/launch.cuh"
#include "kernels/replay_walk.cuh"

namespace kvlab::kernels {

cudaError_t ReplayPolicy::walk(const ReplayArgs& args, cudaStream_t stream) const {
  const ReplayShape& shape = args.shape;
  if (shape.group < 1 || shape.group > kMostReplayGroup || shape.head_size < 4 ||
      shape.head_size > kMostReplayHeadSize || shape.head_size % 4 != 0 || args.rows.count < 1 ||
      args.rows.count > kMostReplayQueries || args.span.blocks > kReplaySpanBlocks ||
      args.member_count < 1 || shape.units > 65535)
    return cudaErrorInvalidValue;
  const void* const kernel = kernels[shape.quads() - 1];
  DeviceLimits limits;
  cudaError_t error = device_limits(limits);
  if (error != cudaSuccess) return error;
  std::size_t room = replay_room(args.room_slots, slot_bytes);
  bool in_room = room + sizeof(ReplayShared) + 1024 <= std::size_t(limits.shared_bytes);
  if (!in_room) room = 0;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(room));
  if (error != cudaSuccess) return error;
  ReplayArgs copy = args;
  void* parameters[] = {&copy, &in_room};
  return cudaLaunchKernel(
      kernel, dim3(static_cast<unsigned>(args.member_count), static_cast<unsigned>(shape.units)),
      dim3(kReplayThreads), parameters, room, stream);
}

}  // namespace kvlab::kernels
