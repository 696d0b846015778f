// Stores, demotes and evicts tokens on tiers. Memory traffic: a decode step moves at most one row
// out of each tier of a pair, and reads 16 bytes per slot to choose the tokens to demote. An append
// reads its keys and values and writes them in quantized form.
#include "kernels/quantized/tiers.hpp"

#include "kernels/device/eviction_order.cuh"
#include "kernels/device/grid_dependency.cuh"
#include "kernels/device/pair.cuh"
#include "kernels/device/select_victims.cuh"
#include "kernels/device/type_dispatch.cuh"
#include "kernels/evict/compact.cuh"
#include "kernels/launch.cuh"
#include "kernels/quantized/quantize.cuh"
#include "policies/rule/tier_assignment.hpp"

namespace kvlab::kernels {
namespace {

constexpr int kStepThreads = 2 * kWarpSize * (kMaxDeviceTiers - 1), kAssignThreads = 1024,
              kMoveThreads = 256;
// Two warps move a token: one its key, the other its value.
constexpr int kTokensOfBlock = kMoveThreads / kWarpSize / 2;

/// The sizes of a layer's rows.
struct RowShape {
  int head_size, element, blocks;
  __device__ explicit RowShape(const kvlab_cache_view& cache, int element_bytes)
      : head_size(cache.head_size), element(element_bytes), blocks(cache.head_size / kWarpSize) {}
};

__device__ RowPart part_at(const QuantizedCache& quantized_cache, const DeviceTierPlan& tier_plan,
                           std::uint32_t row, bool key, const RowShape& shape) {
  const DeviceTier& tier = tier_plan.tier[tier_of(tier_plan, row)];
  return part_of(quantized_cache.bytes, tier, row - tier.first_row, key, shape.head_size,
                 shape.element);
}

// --- A decode step

/// The number of rows of a pair up to the last one in use. `tokens` returns the number of tokens of
/// a tier.
template <class Tokens>
__device__ std::int32_t extent_of(const DeviceTierPlan& tier_plan, Tokens tokens) {
  std::int32_t extent = tokens(0);
  for (int r = 1; r < tier_plan.tiers; ++r)
    if (tokens(r) > 0) extent = static_cast<std::int32_t>(tier_plan.tier[r].first_row) + tokens(r);
  return extent;
}

/// Stores the newest key and value of each pair. A CTA handles a pair; each of its warps handles
/// one quantization block (32 channels) of the key or of the value.
template <class T>
__global__ void store_newest_kernel(kvlab_cache_view cache, QuantizedCache quantized_cache,
                                    const std::uint32_t* now) {
  let_successor_start();
  wait_for_predecessor();
  const Pair pair = pair_of(static_cast<int>(blockIdx.x), cache.kv_heads);
  const std::uint32_t position = now[pair.sequence];
  if (position == kIdle) return;
  const DeviceTierPlan& tier_plan = quantized_cache.tier_plans[pair.index];
  const DeviceFormat format = tier_plan.tier[0].format;
  const std::int32_t slot = cache.next_slots[pair.index];
  const std::uint32_t row = quantized_cache.max_tiers == 1 ? static_cast<std::uint32_t>(slot)
                                                           : quantized_cache.next_rows[pair.index];
  const int blocks = cache.head_size / kWarpSize,
            b = static_cast<int>(threadIdx.x) / kWarpSize % blocks, at = b * kWarpSize + lane_id();
  const bool key = static_cast<int>(threadIdx.x) < cache.head_size;
  T own = static_cast<const T*>(
      key ? quantized_cache.newest_keys
          : quantized_cache.newest_values)[std::int64_t{pair.index} * cache.head_size + at];
  if (key && quantized_cache.centres)
    own = from_float<T>(to_float(own) -
                        quantized_cache.centres[std::int64_t{pair.index} * cache.head_size + at]);
  const RowPart to =
      part_of(quantized_cache.bytes, tier_plan.tier[0], row, key, cache.head_size, sizeof(T));
  if (format.exact()) {
    reinterpret_cast<T*>(to.data)[at] = own;
  } else {
    std::uint32_t quantized, metadata;
    if (format.floating)
      quantize_fp8(hadamard_rotate_block(to_float(own)), quantized, metadata);
    else
      quantize_int(hadamard_rotate_block(to_float(own)), format.bits(key), quantized, metadata);
    store_quantized(quantized, metadata, to, format, key, b, blocks);
  }
  if (threadIdx.x != 0) return;
  cache.positions[cache.first_slot[pair.index] + slot] = position;
  quantized_cache.row_of_slot[cache.first_slot[pair.index] + slot] = row;
  quantized_cache.slot_of_row[tier_plan.first_row + row] = static_cast<std::uint32_t>(slot);
  std::int32_t* const counts = quantized_cache.counts + pair.index * kMaxDeviceTiers;
  counts[0] = max(counts[0], static_cast<std::int32_t>(row) + 1);
  quantized_cache.extents[pair.index] = extent_of(tier_plan, [&](int r) { return counts[r]; });
}

/// A token that is demoted.
struct Move {
  int slot;
  std::uint32_t from, to;  ///< rows
};

/// The tiers of a pair during a step, and each tier's first victim with its row.
struct StepTiers {
  TierLoad loads[kMaxDeviceTiers];
  EvictionCandidate firsts[kMaxDeviceTiers];
  std::uint32_t rows[kMaxDeviceTiers];
};

/// If tier 0 has one token too many, finds the tokens to demote and their new rows, and updates the
/// counts. Moves are listed from tier 0 on. Returns the number of moves.
__device__ int find_moves(const DeviceTierPlan& tier_plan, StepTiers& tiers, Move* moves) {
  Demotion chain[kMaxDeviceTiers];
  const int demotions = demotion_chain(tiers.loads, tiers.firsts, tier_plan.tiers, chain);
  int moved = 0;
  for (int i = 0; i < demotions; ++i) {
    const int from = chain[i].from, to = chain[i].to;
    if (to == tier_plan.tiers) break;  // the token is evicted, and the next token takes its slot
    // If the token's new tier is full, the first victim of that tier is demoted too, and the token
    // takes the victim's row.
    const std::uint32_t row = has_free_slot(tiers.loads[to])
                                  ? tier_plan.tier[to].first_row + tiers.loads[to].tokens++
                                  : tiers.rows[to];
    moves[moved++] = {tiers.firsts[from].slot, tiers.rows[from], row};
  }
  return moved;
}

/// Uses two warps for each move, one for the key and one for the value. All rows are read before
/// any is written, because a demoted token may take the row of the token that the next move
/// demotes.
template <class T>
__global__ void __launch_bounds__(kStepThreads)
    demote_kernel(const EvictingAttentionArgs args, const QuantizedCache quantized_cache,
                  const EvictionCandidate* firsts) {
  __shared__ StepTiers tiers;
  __shared__ Move moves[kMaxDeviceTiers];
  __shared__ int move_count;
  wait_for_predecessor();
  const kvlab_cache_view& cache = args.cache;
  const Pair pair = pair_of(static_cast<int>(blockIdx.x), cache.kv_heads);
  if (args.now[pair.sequence] == kIdle) return;
  const DeviceTierPlan& tier_plan = quantized_cache.tier_plans[pair.index];
  std::int32_t* const counts = quantized_cache.counts + pair.index * kMaxDeviceTiers;
  std::uint32_t* const row_of_slot = quantized_cache.row_of_slot + cache.first_slot[pair.index];
  if (evict_at(args.policy, pair.index) == kUnlimited ||
      static_cast<std::uint32_t>(counts[0]) < tier_plan.tier[0].slots) {
    if (threadIdx.x == 0)
      quantized_cache.next_rows[pair.index] = static_cast<std::uint32_t>(counts[0]);
    return;
  }
  if (const int r = static_cast<int>(threadIdx.x); r < tier_plan.tiers) {
    const EvictionCandidate first = firsts[pair.index * kMaxDeviceTiers + r];
    tiers.firsts[r] = first;
    tiers.rows[r] = first.slot < 0 ? 0 : row_of_slot[first.slot];
    tiers.loads[r] = {static_cast<std::uint32_t>(counts[r]), tier_plan.tier[r].slots};
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    quantized_cache.next_rows[pair.index] = tiers.rows[0];
    move_count = find_moves(tier_plan, tiers, moves);
    quantized_cache.extents[pair.index] = extent_of(
        tier_plan, [&](int r) { return static_cast<std::int32_t>(tiers.loads[r].tokens); });
  }
  __syncthreads();
  if (const int r = static_cast<int>(threadIdx.x); r < tier_plan.tiers)
    counts[r] = static_cast<std::int32_t>(tiers.loads[r].tokens);
  const int mine = static_cast<int>(threadIdx.x) / (2 * kWarpSize);
  const bool key = threadIdx.x / kWarpSize % 2 == 0, moves_one = mine < move_count;
  const RowShape shape(cache, sizeof(T));
  const Move move = moves[moves_one ? mine : 0];
  QuantizedRow row;
  int to = 0;
  if (moves_one) {
    const int from = tier_of(tier_plan, move.from);
    to = tier_of(tier_plan, move.to);
    load_part<T>(row, part_at(quantized_cache, tier_plan, move.from, key, shape),
                 tier_plan.tier[from].format, key, shape.blocks);
    demote(row, tier_plan, from, to, key, shape.blocks);
  }
  __syncthreads();
  if (!moves_one) return;
  store_part<T>(row, part_at(quantized_cache, tier_plan, move.to, key, shape),
                tier_plan.tier[to].format, key, shape.blocks);
  if (key && lane_id() == 0) {
    row_of_slot[move.slot] = move.to;
    quantized_cache.slot_of_row[tier_plan.first_row + move.to] =
        static_cast<std::uint32_t>(move.slot);
  }
}

// --- An append

/// The eviction keys of the kept tokens, for a selection within one tier. Tokens of other tiers get
/// a key that sorts last, so they are not selected.
struct TierKeys {
  EvictionKeys all;
  const std::int32_t *sources, *levels;
  int tier;

  __device__ EvictionKey operator[](std::uint32_t i) const {
    return levels[i] == tier ? all[static_cast<std::uint32_t>(sources[i])] : unselected_key();
  }
};

/// The number of tokens on a tier. Called by the whole thread block.
__device__ std::uint32_t count_level(const std::int32_t* levels, std::uint32_t tokens, int tier) {
  __shared__ std::uint32_t warp_counts[kAssignThreads / kWarpSize];
  std::uint32_t own = 0;
  for (std::uint32_t i = threadIdx.x; i < tokens; i += kAssignThreads) own += levels[i] == tier;
  const std::uint32_t count = block_sum(own, warp_counts);
  __syncthreads();
  return count;
}

/// Demotes the first victims of a tier to the next tier, so that at most `capacity` tokens remain.
/// Called by the whole thread block.
__device__ void demote_surplus(SelectionShared& shared, const TierKeys& keys, std::int32_t* levels,
                               std::uint32_t tokens, std::uint32_t capacity) {
  const std::uint32_t demoted = tokens_to_demote(count_level(levels, tokens, keys.tier), capacity);
  if (demoted == 0) return;
  EvictionThreshold threshold{};
  if (capacity > 0) threshold = select_victims(shared, keys, tokens, demoted);
  for (std::uint32_t i = threadIdx.x; i < tokens; i += kAssignThreads)
    if (levels[i] == keys.tier && (capacity == 0 || threshold.evicts(keys[i])))
      levels[i] = keys.tier + 1;
  __syncthreads();
}

/// Assigns a tier and a row to each kept token. Runs after the kept tokens are chosen. Uses one
/// thread block for each pair.
__global__ void __launch_bounds__(kAssignThreads)
    assign_tiers(const __grid_constant__ kvlab_compact_args args,
                 const QuantizedCache quantized_cache, const StagedTiers staged) {
  __shared__ SelectionShared shared;
  const CompactPair pair(args, static_cast<int>(blockIdx.x));
  if (pair.idle()) return;
  const DeviceTierPlan& tier_plan = quantized_cache.tier_plans[pair.index];
  const std::int64_t line = std::int64_t{pair.index} * args.from.max_slots;
  const CompactWorkspace workspace = compact_parts(args);
  const std::int32_t* const sources = workspace.sources + line;
  std::int32_t* const levels = workspace.holes + line;
  const auto kept = static_cast<std::uint32_t>(args.to.lengths[pair.index]);
  for (std::uint32_t i = threadIdx.x; i < kept; i += kAssignThreads)
    levels[i] = max(int{staged.tiers[line + sources[i]]}, 0);
  __syncthreads();

  const kvlab_rule rule = args.policy.rules[pair.index];
  const std::uint32_t limit = evict_at(args.policy, pair.index), live = pair.live();
  const bool evicts = kept < live;
  const std::uint32_t slots = tier_plan.tier[0].slots;
  const bool full = limit != kUnlimited && tokens_to_evict(count_level(levels, kept, 0), slots,
                                                           slots + (limit - rule.budget)) > 0;
  if (evicts || full) {
    const std::uint32_t waiting = waiting_tokens(live, rule.budget, evicts);
    const EvictionKeys all{workspace.ranks + line, args.from.positions + pair.first_slot,
                           protected_tokens_of(rule), pair.now + pair.appended};
    for (int r = 0; r + 1 < tier_plan.tiers; ++r)
      demote_surplus(shared, {all, sources, levels, r}, levels, kept,
                     tier_capacity(r, tier_plan.tier[r].slots, waiting));
  }
  for (int r = 0; r < tier_plan.tiers; ++r) {
    const auto assign_row = [&](std::uint32_t i, bool here, std::uint32_t before) {
      if (!here) return;
      const std::uint32_t row = tier_plan.tier[r].first_row + before;
      quantized_cache.row_of_slot[args.to.first_slot[pair.index] + i] = row;
      quantized_cache.slot_of_row[tier_plan.first_row + row] = i;
    };
    number_kept_slots(
        shared, kept, [&](std::uint32_t i) { return levels[i] == r; }, assign_row);
    const std::uint32_t count = count_level(levels, kept, r);
    if (threadIdx.x != 0) continue;
    quantized_cache.counts[pair.index * kMaxDeviceTiers + r] = static_cast<std::int32_t>(count);
    if (r == 0) quantized_cache.next_rows[pair.index] = count;
  }
  if (threadIdx.x == 0)
    quantized_cache.extents[pair.index] = extent_of(
        tier_plan, [&](int r) { return quantized_cache.counts[pair.index * kMaxDeviceTiers + r]; });
}

/// The token that a warp moves, and whether the warp moves the key or the value.
struct MovedRow {
  int pair;
  std::int64_t i;  ///< index among the kept tokens
  bool key, wanted;
  /// `source` is the token's slot in `from`, relative to the pair's first slot. The members `from`
  /// and `to` are the old and the new slot as indices among the slots of all pairs.
  std::int64_t source, from, to;

  __device__ explicit MovedRow(const kvlab_compact_args& args)
      : pair(static_cast<int>(blockIdx.y)),
        i(std::int64_t{blockIdx.x} * kTokensOfBlock + threadIdx.x / (2 * kWarpSize)),
        key(threadIdx.x / kWarpSize % 2 == 0),
        wanted(args.now[pair / args.from.kv_heads] != kIdle && i < args.to.lengths[pair]) {
    if (!wanted) return;
    source = compact_parts(args).sources[std::int64_t{pair} * args.from.max_slots + i];
    from = args.from.first_slot[pair] + source;
    to = args.to.first_slot[pair] + i;
  }
};

template <class T>
__device__ T* row_in(const kvlab_cache_view& cache, std::int64_t slot, bool key) {
  return static_cast<T*>(key ? cache.keys : cache.values) + slot * cache.head_size;
}

/// The index of a block of a staged token in StagedTiers::metadata. The quantized number of a lane
/// is at 32 times this index plus the lane, in StagedTiers::data.
__device__ std::int64_t staged_at(std::int64_t slot, bool key, int block, const RowShape& shape) {
  return (slot * 2 + (key ? 0 : 1)) * shape.blocks + block;
}

template <class T>
__global__ void __launch_bounds__(kMoveThreads)
    take_rows(const __grid_constant__ kvlab_compact_args args, const QuantizedCache quantized_cache,
              const StagedTiers staged) {
  const MovedRow at(args);
  if (!at.wanted) return;
  const RowShape shape(args.from, sizeof(T));
  const DeviceTierPlan& tier_plan = quantized_cache.tier_plans[at.pair];
  const std::uint32_t row_index = quantized_cache.row_of_slot[at.from];
  const int tier = tier_of(tier_plan, row_index);
  const DeviceFormat format = tier_plan.tier[tier].format;
  QuantizedRow row;
  load_part<T>(row, part_at(quantized_cache, tier_plan, row_index, at.key, shape), format, at.key,
               shape.blocks);
  if (at.key && lane_id() == 0) staged.tiers[at.to] = static_cast<std::int8_t>(tier);
  if (!format.exact()) {
#pragma unroll
    for (int b = 0; b < kMaxBlocks; ++b) {
      if (b >= shape.blocks) break;
      const std::int64_t block = staged_at(at.to, at.key, b, shape);
      staged.data[block * kWarpSize + lane_id()] = static_cast<std::uint8_t>(row.quantized[b]);
      if (lane_id() == 0) staged.metadata[block] = row.metadata[b];
    }
    hadamard_rotate(row, shape.blocks);
#pragma unroll
    for (float& y : row.y) y /= kQuantBlock;
  }
  store_exact(row, row_in<T>(args.to, at.to, at.key), shape.blocks);
}

template <class T>
__global__ void __launch_bounds__(kMoveThreads)
    move_to_tiers(const __grid_constant__ kvlab_compact_args args,
                  const QuantizedCache quantized_cache, const StagedTiers staged) {
  const MovedRow at(args);
  if (!at.wanted) return;
  const RowShape shape(args.from, sizeof(T));
  const DeviceTierPlan& tier_plan = quantized_cache.tier_plans[at.pair];
  const int own = staged.tiers[at.from];
  QuantizedRow row;
  if (own < 0 || tier_plan.tier[own].format.exact()) {
    load_exact(row, row_in<T>(args.from, at.from, at.key), shape.blocks);
  } else {
#pragma unroll
    for (int b = 0; b < kMaxBlocks; ++b) {
      if (b >= shape.blocks) break;
      const std::int64_t block = staged_at(at.from, at.key, b, shape);
      row.quantized[b] = staged.data[block * kWarpSize + lane_id()];
      row.metadata[b] = staged.metadata[block];
      row.y[b] = dequantize(tier_plan.tier[own].format.floating, row.quantized[b], row.metadata[b]);
    }
  }
  const std::uint32_t row_index = quantized_cache.row_of_slot[at.to];
  const int tier = tier_of(tier_plan, row_index);
  demote(row, tier_plan, own, tier, at.key, shape.blocks);
  store_part<T>(row, part_at(quantized_cache, tier_plan, row_index, at.key, shape),
                tier_plan.tier[tier].format, at.key, shape.blocks);
}

dim3 move_grid(const kvlab_cache_view& to, int pairs) {
  return {static_cast<unsigned>((to.max_slots + kTokensOfBlock - 1) / kTokensOfBlock),
          static_cast<unsigned>(pairs)};
}
int pairs_of(const kvlab_cache_view& cache) { return cache.sequences * cache.kv_heads; }

}  // namespace

cudaError_t store_newest(const kvlab_cache_view& cache, const QuantizedCache& quantized_cache,
                         const std::uint32_t* now, cudaStream_t stream) {
  DeviceLimits limits;
  if (const cudaError_t error = device_limits(limits)) return error;
  return with_type(cache.type, [&]<class T>(T) {
    const auto kernel = store_newest_kernel<T>;
    if (const cudaError_t error = allow_shared_memory(kernel, limits)) return error;
    return launch(limits, kernel,
                  {static_cast<unsigned>(pairs_of(cache)),
                   static_cast<unsigned>(2 * cache.head_size), 0, stream},
                  cache, quantized_cache, now);
  });
}

cudaError_t demote_pairs(const EvictingAttentionArgs& args, const EvictionCandidate* firsts,
                         cudaStream_t stream) {
  DeviceLimits limits;
  if (const cudaError_t error = device_limits(limits)) return error;
  const QuantizedCache& quantized_cache = *args.quantized_cache;
  return with_type(args.cache.type, [&]<class T>(T) {
    return launch(
        limits, demote_kernel<T>,
        {static_cast<unsigned>(pairs_of(args.cache)),
         static_cast<unsigned>(2 * kWarpSize * (quantized_cache.max_tiers - 1)), 0, stream},
        args, quantized_cache, firsts);
  });
}

cudaError_t read_from_tiers(const DevicePolicy& policy, const kvlab_compact_args& args,
                            const QuantizedCache& quantized_cache, const StagedTiers& staged,
                            cudaStream_t stream) {
  if (const cudaError_t error = compact(policy, args, stream, false)) return error;
  return with_type(args.from.type, [&]<class T>(T) {
    take_rows<T><<<move_grid(args.from, pairs_of(args.from)), kMoveThreads, 0, stream>>>(
        args, quantized_cache, staged);
    return cudaGetLastError();
  });
}

cudaError_t compact_to_tiers(const DevicePolicy& policy, const kvlab_compact_args& args,
                             const QuantizedCache& quantized_cache, const StagedTiers& staged,
                             cudaStream_t stream) {
  if (const cudaError_t error = compact(policy, args, stream, false)) return error;
  const int pairs = pairs_of(args.from);
  assign_tiers<<<static_cast<unsigned>(pairs), kAssignThreads, 0, stream>>>(args, quantized_cache,
                                                                            staged);
  if (const cudaError_t error = cudaGetLastError()) return error;
  return with_type(args.from.type, [&]<class T>(T) {
    move_to_tiers<T>
        <<<move_grid(args.to, pairs), kMoveThreads, 0, stream>>>(args, quantized_cache, staged);
    return cudaGetLastError();
  });
}

}  // namespace kvlab::kernels
