// The part of a compaction that does not depend on the policy: it chooses the kept tokens by their
// ranks, and moves them.
//
// Memory traffic: choosing reads 12 bytes per live token several times (from the L2 cache). Moving
// reads and writes the data of kept tokens, 4 * head_size * bytes_of(type) bytes and a state per
// token. This is the lower bound.
//
// Modifiers read ranks by age. The age of a token is found by binary searches in sorted tiles of
// 2,048 positions. For n older tokens, each of them takes n / 2048 searches of 11 steps.
#include <cub/block/block_radix_sort.cuh>

#include "kernels/device/pair.cuh"
#include "kernels/device/select_victims.cuh"
#include "kernels/evict/compact.cuh"
#include "kernels/launch.cuh"
#include "kernels/why_not.hpp"
#include "policies/modifiers/pooled_rank.hpp"
#include "policies/rule/live_tokens.hpp"

namespace kvlab::kernels {
namespace {

constexpr int kThreads = 1024;
constexpr std::uint32_t kSortItems = 8,  // positions that a thread sorts
    kSortTile = kCompactThreads * kSortItems;

/// Sorts the positions of a pair's older tokens (blockIdx.y) within each tile, and writes them to
/// workspace.holes, which no other kernel needs before tokens are chosen. Uses one thread block for
/// each tile.
__global__ void __launch_bounds__(kCompactThreads)
    sort_positions(const __grid_constant__ kvlab_compact_args args) {
  using Sort = cub::BlockRadixSort<std::uint32_t, kCompactThreads, static_cast<int>(kSortItems)>;
  __shared__ typename Sort::TempStorage shared;
  const CompactPair pair(args, static_cast<int>(blockIdx.y));
  const std::uint32_t tile = blockIdx.x * kSortTile, first = tile + threadIdx.x * kSortItems;
  if (pair.idle() || tile >= pair.older) return;
  const std::uint32_t* const from = args.from.positions + pair.first_slot;
  std::int32_t* const to =
      compact_parts(args).holes + std::size_t(pair.index) * args.from.max_slots;
  std::uint32_t positions[kSortItems];
  for (std::uint32_t i = 0; i < kSortItems; ++i)
    positions[i] = first + i < pair.older ? from[first + i] : ~0u;
  Sort(shared).Sort(positions);
  for (std::uint32_t i = 0; i < kSortItems; ++i)
    if (first + i < pair.older) to[first + i] = static_cast<std::int32_t>(positions[i]);
}

/// The number of positions below `position` in sorted tiles. `sorted`: [older].
__device__ std::uint32_t count_before(const std::int32_t* sorted, std::uint32_t older,
                                      std::uint32_t position) {
  std::uint32_t count = 0;
  for (std::uint32_t tile = 0; tile < older; tile += kSortTile) {
    std::uint32_t begin = tile, end = min(tile + kSortTile, older);
    while (begin < end) {
      const std::uint32_t middle = (begin + end) / 2;
      if (static_cast<std::uint32_t>(sorted[middle]) < position)
        begin = middle + 1;
      else
        end = middle;
    }
    count += begin - tile;
  }
  return count;
}

/// Writes ranks by age, [pair, max_slots], and each slot's age (to workspace.sources). Uses one
/// thread for each slot of a pair (blockIdx.y). New tokens follow the older ones in order, so the
/// age of a new token is its slot.
__global__ void __launch_bounds__(kCompactThreads)
    number_ranks(const __grid_constant__ kvlab_compact_args args, std::uint64_t* by_age) {
  const CompactPair pair(args, static_cast<int>(blockIdx.y));
  const std::uint32_t slot = blockIdx.x * kCompactThreads + threadIdx.x;
  if (pair.idle() || slot >= pair.live()) return;
  const std::size_t row = std::size_t(pair.index) * args.from.max_slots;
  const CompactWorkspace workspace = compact_parts(args);
  const std::uint32_t age = slot < pair.older
                                ? count_before(workspace.holes + row, pair.older,
                                               args.from.positions[pair.first_slot + slot])
                                : slot;
  workspace.sources[row + slot] = static_cast<std::int32_t>(age);
  by_age[row + age] = workspace.ranks[row + slot];
}

/// Ranks by age, [device, pair, max_slots].
struct RanksByAge {
  const std::uint64_t* ranks;
  int devices;
};

/// The rank of the token of this age: the pair's own rank or, with by_layer, the sum over the
/// sequence's KV heads in their order.
__device__ std::uint64_t rank_at(const kvlab_compact_args& args, const RanksByAge& by_age,
                                 const CompactPair& pair, RankType type, std::uint32_t age) {
  const auto rank_of = [&](int row) {
    return by_age.ranks[std::size_t(row) * args.from.max_slots + age];
  };
  if (args.by_layer == 0) return rank_of(pair.index);
  const int heads = args.from.kv_heads;
  std::uint64_t sum = rank_of(pair.sequence * heads);
  for (int head = 1; head < by_age.devices * heads; ++head) {
    const int sequence = head / heads * args.from.sequences + pair.sequence;
    sum = rank_sum(type, sum, rank_of(sequence * heads + head % heads));
  }
  return sum;
}

/// Applies the modifiers to the ranks, which it reads by age.
__global__ void __launch_bounds__(kCompactThreads)
    modify_ranks(const __grid_constant__ kvlab_compact_args args, RanksByAge by_age,
                 RankType type) {
  const CompactPair pair(args, static_cast<int>(blockIdx.y));
  const std::uint32_t slot = blockIdx.x * kCompactThreads + threadIdx.x, live = pair.live();
  if (pair.idle() || slot >= live) return;
  const CompactWorkspace workspace = compact_parts(args);
  const std::size_t at = std::size_t(pair.index) * args.from.max_slots + slot;
  const auto age = static_cast<std::uint32_t>(workspace.sources[at]);
  const std::uint32_t reach = min(args.smooth, live), end = min(age + reach + 1, live);
  PooledRank pooled(args.pool_max ? Modifiers::Pool::max : Modifiers::Pool::mean, type);
  for (std::uint32_t a = age - min(age, reach); a < end; ++a)
    pooled.take(rank_at(args, by_age, pair, type, a));
  workspace.ranks[at] = pooled.value();
}

/// Chooses the kept tokens and their new slots. Uses one thread block for each pair.
__global__ void __launch_bounds__(kThreads)
    choose_stayers(const __grid_constant__ kvlab_compact_args args, bool in_place) {
  __shared__ SelectionShared shared;
  const CompactPair pair(args, static_cast<int>(blockIdx.x));
  if (pair.idle()) return;
  const std::uint32_t live = pair.live();
  const kvlab_rule rule = args.policy.rules[pair.index];
  const std::uint32_t kept =
      live - tokens_to_evict(live, rule.budget, evict_at(args.policy, pair.index));
  const std::size_t row = std::size_t(pair.index) * args.from.max_slots;
  const CompactWorkspace workspace = compact_parts(args);
  const EvictionKeys keys{workspace.ranks + row, args.from.positions + pair.first_slot,
                          protected_tokens_of(rule), pair.now + pair.appended};
  std::int32_t* const sources = workspace.sources + row;
  std::int32_t* const holes = workspace.holes + row;

  if (kept > 0) {
    const EvictionThreshold threshold =
        kept == live ? EvictionThreshold{{}, 0} : select_victims(shared, keys, live, live - kept);
    const auto stays = [&](std::uint32_t i) { return !threshold.evicts(keys[i]); };
    const auto note_source = [&](std::uint32_t i, bool stays_here, std::uint32_t before) {
      const auto slot = static_cast<std::int32_t>(i);
      if (!in_place) {
        if (stays_here) sources[before] = slot;
      } else if (i < kept) {
        if (stays_here)
          sources[i] = slot;
        else
          holes[i - before] = slot;
      }
    };
    // The number of kept tokens in slots from `kept` on equals the number of holes, which are slots
    // below `kept` whose tokens are evicted. The first of these kept tokens moves to the last hole,
    // the second to the last but one, and so on.
    const auto fill_hole = [&](std::uint32_t i, bool stays_here, std::uint32_t before) {
      if (!stays_here || i < kept) return;

      const std::uint32_t fills = kept - before - 1;
      sources[holes[fills]] = static_cast<std::int32_t>(i);
    };
    number_kept_slots(shared, live, stays, note_source);
    if (in_place && kept < live) number_kept_slots(shared, live, stays, fill_hole);
  }
  __syncthreads();  // every thread has read the lengths, which may be the array written below
  if (threadIdx.x == 0) {
    args.to.lengths[pair.index] = static_cast<std::int32_t>(kept);
    args.to.next_slots[pair.index] = static_cast<std::int32_t>(kept);
  }
}

/// Moves the kept tokens. Uses one thread for each 16 bytes of a key and the same bytes of its
/// value.
__global__ void __launch_bounds__(kCompactThreads)
    move_stayers(const __grid_constant__ kvlab_compact_args args, int slot_bytes, int features,
                 int chunks, int bytes, bool in_place, bool rows) {
  const int pair = static_cast<int>(blockIdx.y);
  if (args.now[pair / args.from.kv_heads] == kIdle) return;
  const std::int64_t i = std::int64_t{blockIdx.x} * kCompactThreads + threadIdx.x;
  const std::int64_t slot = i / chunks, chunk = i % chunks;
  if (slot >= args.to.lengths[pair]) return;
  const std::int64_t source =
      compact_parts(args).sources[std::int64_t{pair} * args.from.max_slots + slot];
  if (in_place && source == slot) return;
  const std::int64_t from_row = row_of(args.from, pair, source) * bytes,
                     to_row = row_of(args.to, pair, slot) * bytes;
  const auto move = [&](const void* source_rows, void* target_rows) {
    reinterpret_cast<uint4*>(static_cast<char*>(target_rows) + to_row)[chunk] =
        reinterpret_cast<const uint4*>(static_cast<const char*>(source_rows) + from_row)[chunk];
  };
  if (rows) {
    move(args.from.keys, args.to.keys);
    move(args.from.values, args.to.values);
  }
  if (chunk != 0) return;
  const std::int64_t from = args.from.first_slot[pair] + source;
  const std::int64_t to = args.to.first_slot[pair] + slot;
  args.to.positions[to] = args.from.positions[from];
  const auto* const states = static_cast<const std::byte*>(args.policy.states);
  for (int byte = 0; byte < slot_bytes; ++byte)
    static_cast<std::byte*>(args.to_states)[to * slot_bytes + byte] =
        states[from * slot_bytes + byte];
  for (int c = 0; c < features; ++c)
    args.to_features[to * features + c] = args.policy.features[from * features + c];
}

__global__ void __launch_bounds__(kCompactThreads)
    copy_tokens(const __grid_constant__ kvlab_prefix_args args, bool seen, int features) {
  const int pair = static_cast<int>(blockIdx.y);
  const int token = static_cast<int>(blockIdx.x) * kCompactThreads + static_cast<int>(threadIdx.x);
  if (token >= args.tokens) return;
  const std::int64_t from = args.first_slot[pair % args.kv_heads] + token,
                     to = args.to_first_slot[pair] + token;
  if (seen) args.to_seen[to] = args.seen[from];
  for (int c = 0; c < features; ++c)
    args.to_features[to * features + c] = args.features[from * features + c];
}

}  // namespace

std::size_t compact_workspace(const kvlab_cache_view& from) {
  return std::size_t(from.sequences) * from.kv_heads * from.max_slots *
         (2 * sizeof(std::uint64_t) + 2 * sizeof(std::int32_t));
}

namespace {

bool modifies(const kvlab_compact_args& args) { return args.by_layer != 0 || args.smooth > 0; }

dim3 grid_of(const kvlab_compact_args& args) {
  return dim3(static_cast<unsigned>((args.from.max_slots + kCompactThreads - 1) / kCompactThreads),
              static_cast<unsigned>(args.from.sequences * args.from.kv_heads));
}

cudaError_t modify(const DevicePolicy& policy, const kvlab_compact_args& args,
                   const RanksByAge& by_age, cudaStream_t stream) {
  modify_ranks<<<grid_of(args), kCompactThreads, 0, stream>>>(args, by_age, policy.rank_type);
  return cudaGetLastError();
}

/// Does the rest of a compaction, when the workspace holds the rank of every live token.
cudaError_t keep_survivors(const DevicePolicy& policy, const kvlab_compact_args& args, bool rows,
                           cudaStream_t stream) {
  const bool in_place =
      args.from.keys == args.to.keys && args.from.pages.blocks == args.to.pages.blocks;
  const auto pairs = static_cast<unsigned>(args.from.sequences * args.from.kv_heads);
  choose_stayers<<<pairs, kThreads, 0, stream>>>(args, in_place);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  const int bytes = static_cast<int>(bytes_of(args.from.type));
  const int chunks = args.from.head_size * bytes / 16;
  const std::int64_t max_blocks = std::int64_t{args.to.max_slots} * chunks;
  const dim3 grid(static_cast<unsigned>((max_blocks + kCompactThreads - 1) / kCompactThreads),
                  pairs);
  move_stayers<<<grid, kCompactThreads, 0, stream>>>(args, static_cast<int>(policy.slot_bytes),
                                                     static_cast<int>(policy.features.size()),
                                                     chunks, bytes, in_place, rows);
  return cudaGetLastError();
}

}  // namespace

const std::uint64_t* ranks_of(const kvlab_compact_args& args) { return compact_parts(args).ranks; }

cudaError_t compact(const DevicePolicy& policy, const kvlab_compact_args& args, cudaStream_t stream,
                    bool rows) {
  const cudaError_t error = rank_tokens(policy, args, stream);
  return error == cudaSuccess ? keep_survivors(policy, args, rows, stream) : error;
}

cudaError_t copy_prefix(const DevicePolicy& policy, const kvlab_prefix_args& args,
                        cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((args.tokens + kCompactThreads - 1) / kCompactThreads),
                  static_cast<unsigned>(args.sequences * args.kv_heads));
  copy_tokens<<<grid, kCompactThreads, 0, stream>>>(args, policy.needs != Needs::nothing,
                                                    static_cast<int>(policy.features.size()));
  return cudaGetLastError();
}

cudaError_t rank_tokens(const DevicePolicy& policy, const kvlab_compact_args& args,
                        cudaStream_t stream) {
  std::uint64_t* const by_age = compact_parts(args).by_age;
  const cudaError_t error = rank_by_age(policy, args, by_age, stream);
  return error == cudaSuccess && modifies(args) ? modify(policy, args, {by_age, 1}, stream) : error;
}

cudaError_t rank_by_age(const DevicePolicy& policy, const kvlab_compact_args& args,
                        std::uint64_t* by_age, cudaStream_t stream) {
  if (!why_not(policy, args).empty()) return cudaErrorInvalidValue;
  kvlab_compact_args first = args;
  void* parameters[] = {&first};
  if (const cudaError_t error = cudaLaunchKernel(policy.settle_tokens, grid_of(args),
                                                 dim3(kCompactThreads), parameters, 0, stream);
      error != cudaSuccess || !modifies(args))
    return error;
  dim3 tiles = grid_of(args);
  tiles.x = (tiles.x + kSortItems - 1) / kSortItems;
  sort_positions<<<tiles, kCompactThreads, 0, stream>>>(args);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  number_ranks<<<grid_of(args), kCompactThreads, 0, stream>>>(args, by_age);
  return cudaGetLastError();
}

cudaError_t keep_by_ranks(const DevicePolicy& policy, const kvlab_compact_args& args,
                          const std::uint64_t* by_age, int devices, cudaStream_t stream) {
  if (!why_not(policy, args).empty()) return cudaErrorInvalidValue;
  const cudaError_t error = modify(policy, args, {by_age, devices}, stream);
  return error == cudaSuccess ? keep_survivors(policy, args, true, stream) : error;
}

}  // namespace kvlab::kernels
