// Launches a policy's walk.
#include <algorithm>

#include "kernels/launch.cuh"
#include "kernels/launch_plans.hpp"
#include "kernels/replay/old_keys.cuh"
#include "kernels/replay/tiers.cuh"

namespace kvlab::kernels {
namespace {

bool is_launchable(const ReplayWalkArgs& args, const ReplayMembers& members, int tasks) {
  const ReplayShape& shape = args.shape;
  return shape.is_launchable() && shape.head_size >= 8 && shape.head_size % 8 == 0 &&
         shape.rotated % 4 == 0 && args.rows.block <= kMaxReplayQueries &&
         args.measured.blocks <= static_cast<int>(kMaxQueryBlocks) &&
         args.layer_heads <= kMaxLayerHeads &&
         (!args.layer_heads || tasks % args.layer_heads == 0) && members.count > 0 &&
         (members.tokens != ReplayTokens::cache_positions || shape.tokens <= kMaxOldDistance) &&
         members.max_tiers <= kMaxReplayTiers &&
         (members.max_tiers > 0) == (members.tokens == ReplayTokens::tiered);
}

constexpr std::size_t kReserved = 1024 + sizeof(ReplayShared);

/// Bytes of shared memory of a thread block, without the slots.
std::size_t bytes_of_tokens(const ReplayShape& shape, bool cache_positions, int tiers) {
  return bytes_of_words(shape) * static_cast<std::size_t>(1 + tiers) +
         (cache_positions ? OldKeyLayout(shape).bytes() : 0);
}
std::size_t max_dynamic_bytes(bool is_tiered, const DeviceLimits& limits) {
  return static_cast<std::size_t>(limits.shared_bytes) - kReserved -
         (is_tiered ? sizeof(TierShared) : 0);
}

}  // namespace

bool walk_fits(const ReplayShape& shape, ReplayTokens tokens, int tiers,
               const DeviceLimits& limits) {
  return bytes_of_tokens(shape, tokens == ReplayTokens::cache_positions, tiers) <=
         max_dynamic_bytes(tokens == ReplayTokens::tiered, limits);
}

cudaError_t plan_walk(const ReplayWalkArgs& args, const ReplayMembers& members,
                      ReplayWalkPlan& plan) {
  DeviceLimits limits;
  if (const cudaError_t error = device_limits(limits); error != cudaSuccess) return error;
  return plan_walk(args, members, limits, plan);
}

cudaError_t plan_walk(const ReplayWalkArgs& args, const ReplayMembers& members,
                      const DeviceLimits& limits, ReplayWalkPlan& plan) {
  const int tasks = args.sweep.config_tasks ? args.sweep.config_tasks : args.shape.tasks;
  if (!is_launchable(args, members, tasks)) return cudaErrorInvalidValue;
  const bool cache_positions = members.tokens == ReplayTokens::cache_positions,
             is_tiered = members.tokens == ReplayTokens::tiered;
  plan.grid = grid_of(members.count, tasks);
  plan.threads = replay_threads(args.max_slots, cache_positions);
  plan.multiprocessors = limits.multiprocessors;
  plan.max_shared_bytes = max_dynamic_bytes(is_tiered, limits);
  plan.shared_bytes = bytes_of_tokens(args.shape, cache_positions, members.max_tiers);
  if (plan.shared_bytes > plan.max_shared_bytes) return cudaErrorNotSupported;
  // Bytes per slot: state, position, and, where they are needed, cache position, list entry and
  // tier. The number of slots is rounded up to whole strips.
  const std::size_t bytes_per_slot =
                        members.slot_bytes + sizeof(std::uint32_t) +
                        (cache_positions ? sizeof(std::uint32_t) + sizeof(OldItem) : 0) +
                        (is_tiered ? 1 : 0),
                    slots = bytes_per_slot * whole_strips(args.max_slots, cache_positions);
  const bool in_shared = plan.shared_bytes + slots <= plan.max_shared_bytes;
  if (in_shared) plan.shared_bytes += slots;
  plan.variant = {args.shape.head_groups(), members.tokens, in_shared, args.shape.type,
                  members.largest};
  return cudaSuccess;
}

cudaError_t replay_walk(const void* kernel, const ReplayWalkPlan& plan, const ReplayWalkArgs& args,
                        cudaStream_t stream) {
  if (!args.rows.is_launchable()) return cudaErrorInvalidValue;
  if (const cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(plan.max_shared_bytes));
      error != cudaSuccess)
    return error;
  void* parameters[] = {const_cast<ReplayWalkArgs*>(&args)};
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

cudaError_t replay_waves(const void* kernel, const ReplayWalkPlan& plan, int& waves) {
  int resident = 0;
  const cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
      &resident, kernel, static_cast<int>(plan.threads), plan.shared_bytes);
  if (error != cudaSuccess) return error;
  const int resident_blocks = resident * plan.multiprocessors,
            blocks = static_cast<int>(plan.grid.x * plan.grid.y);
  waves = (blocks + resident_blocks - 1) / resident_blocks;
  return cudaSuccess;
}

}  // namespace kvlab::kernels
