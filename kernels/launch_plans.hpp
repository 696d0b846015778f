// Launch plans of each kernel for a GPU with given limits. They are pure functions, which run
// without a GPU. Code that allocates memory for a kernel first checks here that the kernel can be
// launched.
//
// Launchers whose shared memory is static, or at most 48 KiB for every shape, have no plan here,
// because every GPU has that much.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/device_limits.hpp"
#include "kernels/types.hpp"

namespace kvlab::kernels {

struct PairAttention;  // kernels/decode/pair_attention.hpp
enum class Form;       // kernels/linear/linear.hpp
struct Routes;         // kernels/linear/experts.hpp
struct ReplayShape;    // kernels/replay/replay.hpp
enum class ReplayTokens;
struct ReplayWalkArgs;   // kernels/replay/replay.hpp
struct ReplayMembers;    // kernels/replay/replay.hpp
struct ReplayWalkPlan;   // kernels/replay/replay.hpp
struct EvictionKernels;  // kernels/evict/eviction_kernels.hpp

/// The kernel of decode attention. one_by_one requests tiles of keys and values one at a time.
/// all_ahead fills all its shared memory with requests at once. clusters uses a cluster of thread
/// blocks for each pair.
enum class PairKernel { one_by_one, all_ahead, clusters };
struct PairLaunch {
  PairKernel kernel;
  LaunchPlan plan;
};
/// Plans decode attention for a supported shape.
PairLaunch pair_attention_plan(const PairAttention& args, const DeviceLimits& limits);
/// Plans decode attention over tiers, with args.table.max_slots rows of at most `max_row_bytes`
/// bytes.
LaunchPlan tier_attention_plan(const PairAttention& args, int max_row_bytes,
                               const DeviceLimits& limits);
/// Plan prefill attention, and the second pass that observes it. The plans depend on the type and
/// the head size.
LaunchPlan prefill_plan(Type type, int head_size, const DeviceLimits& limits);
LaunchPlan observe_plan(Type type, int head_size, const DeviceLimits& limits);
/// Plans a product of a decode step. Its shared memory grows with k; one launch handles plan.rows
/// rows of x.
LaunchPlan linear_plan(Type type, Form form, int rows, int n, int k, const DeviceLimits& limits);
/// Plans a product of experts, for 2-byte types. `n`: number of outputs of an expert.
LaunchPlan expert_product_plan(const Routes& routes, int n, const DeviceLimits& limits);

/// Whether the bits that a walk keeps for live tokens fit in the shared memory of a thread block. A
/// walk keeps shape.tokens bits for the cache, as many for each of its tiers, and the memory that
/// cache positions need.
bool walk_fits(const ReplayShape& shape, ReplayTokens tokens, int tiers,
               const DeviceLimits& limits);
/// See plan_walk() in kernels/replay/replay.hpp.
cudaError_t plan_walk(const ReplayWalkArgs& args, const ReplayMembers& members,
                      const DeviceLimits& limits, ReplayWalkPlan& plan);
/// The number of tokens of a row that replay_rows() keeps in shared memory.
int replay_cached_tokens(int tokens, const DeviceLimits& limits);
/// Plans replay_outputs(). Includes static shared memory.
LaunchPlan replay_outputs_plan(Type type, const DeviceLimits& limits);

// The next functions say why there is no plan, with the limit that is exceeded. The text is empty
// if there is a plan.

std::string why_not_pair_attention(const PairAttention& args, const DeviceLimits& limits);
/// The same for a cache's decode attention. The text is also empty for a shape that no GPU
/// supports.
std::string why_not_attention(const kvlab_cache_view& cache, kvlab_numbering numbering,
                              const DeviceLimits& limits);
std::string why_not_tier_attention(const PairAttention& args, int max_row_bytes,
                                   const DeviceLimits& limits);
std::string why_not_prefill(Type type, int head_size, const DeviceLimits& limits);
std::string why_not_linear(Type type, Form form, int k, const DeviceLimits& limits);

}  // namespace kvlab::kernels
