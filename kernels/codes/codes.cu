// The rule on rungs. Bytes: of a step a row for each rung and pair, and 16 a slot for who goes
// down; of an admission its keys and values read and their codes written.
#include "kernels/codes/codes.hpp"

#include "kernels/codes/code.cuh"
#include "kernels/device/grid_dependency.cuh"
#include "kernels/device/leaving.cuh"
#include "kernels/device/pair.cuh"
#include "kernels/device/select_leaving.cuh"
#include "kernels/device/type_dispatch.cuh"
#include "kernels/evict/shrink.cuh"
#include "kernels/launch.cuh"

namespace kvlab::kernels {
namespace {

constexpr int kStepThreads = 2 * kWarpSize * (kMostRungs - 1), kDealThreads = 1024,
              kMoveThreads = 256;
constexpr int kTokensOfBlock = kMoveThreads / kWarpSize / 2;  // a warp for a key, one for a value

/// The shape of a layer's rows.
struct RowShape {
  int head_size, element, blocks;
  __device__ explicit RowShape(const kvlab_cache& cache, int element_bytes)
      : head_size(cache.head_size), element(element_bytes), blocks(cache.head_size / kWarpSize) {}
};

__device__ RowPart part_at(const CodedCache& coded, const DeviceLadder& ladder, std::uint32_t row,
                           bool key, const RowShape& shape) {
  const DeviceRung& rung = ladder.rung[rung_of(ladder, row)];
  return part_of(coded.bytes, rung, row - rung.first_row, key, shape.head_size, shape.element);
}

// --- A step
// ---------------------------------------------------------------------------------------

/// Rows of a pair, up to the last in use. `tokens`: of a rung.
template <class Tokens>
__device__ std::int32_t extent_of(const DeviceLadder& ladder, Tokens tokens) {
  std::int32_t extent = tokens(0);
  for (int r = 1; r < ladder.rungs; ++r)
    if (tokens(r) > 0) extent = static_cast<std::int32_t>(ladder.rung[r].first_row) + tokens(r);
  return extent;
}

/// A warp for each block of a pair's newest key and value.
template <class T>
__global__ void place_newest_kernel(kvlab_cache cache, CodedCache coded, const std::uint32_t* now) {
  let_successor_start();
  wait_for_predecessor();
  const Pair pair = pair_of(static_cast<int>(blockIdx.x), cache.kv_heads);
  const std::uint32_t position = now[pair.sequence];
  if (position == kIdle) return;
  const DeviceLadder& ladder = coded.ladders[pair.index];
  const DeviceForm form = ladder.rung[0].form;
  const std::int32_t slot = cache.next_slots[pair.index];
  const std::uint32_t row =
      coded.most_rungs == 1 ? static_cast<std::uint32_t>(slot) : coded.next_rows[pair.index];
  const int blocks = cache.head_size / kWarpSize,
            b = static_cast<int>(threadIdx.x) / kWarpSize % blocks,
            at = b * kWarpSize + code_lane();
  const bool key = static_cast<int>(threadIdx.x) < cache.head_size;
  const T own = static_cast<const T*>(
      key ? coded.newest_keys
          : coded.newest_values)[std::int64_t{pair.index} * cache.head_size + at];
  const RowPart to = part_of(coded.bytes, ladder.rung[0], row, key, cache.head_size, sizeof(T));
  if (form.exact()) {
    reinterpret_cast<T*>(to.codes)[at] = own;
  } else {
    std::uint32_t code, metadata;
    if (form.floating)
      code_floating(butterfly(to_float(own)), code, metadata);
    else
      code_whole(butterfly(to_float(own)), form.bits(key), code, metadata);
    store_code(code, metadata, to, form, key, b, blocks);
  }
  if (threadIdx.x != 0) return;
  cache.positions[cache.first_slot[pair.index] + slot] = position;
  coded.places[cache.first_slot[pair.index] + slot] = row;
  coded.owners[ladder.first_row + row] = static_cast<std::uint32_t>(slot);
  std::int32_t* const counts = coded.counts + pair.index * kMostRungs;
  counts[0] = max(counts[0], static_cast<std::int32_t>(row) + 1);
  coded.extents[pair.index] = extent_of(ladder, [&](int r) { return counts[r]; });
}

/// A token on its way down.
struct Move {
  int slot;
  std::uint32_t from, to;  ///< rows
};

/// A rung in a step: who leaves it first, from which row.
struct StepRung {
  Leaving first;
  std::uint32_t row, first_row, slots, tokens;
};

/// Who goes where, as AgedSet::deal_one says: rung 0 has one too many. Deeper moves come last.
/// Returns how many.
__device__ int chain_of(StepRung* rungs, int count, Move* moves) {
  StepRung going = rungs[0];
  int moved = 0;
  for (int r = 1; r < count; ++r) {
    StepRung& rung = rungs[r];
    const bool has_room = rung.tokens < rung.slots;
    if (!has_room && !(rung.first.slot >= 0 && rung.first.key < going.first.key)) continue;
    moves[moved++] = {going.first.slot, going.row,
                      has_room ? rung.first_row + rung.tokens++ : rung.row};
    if (has_room) break;
    going = rung;
  }
  return moved;
}

/// Two warps for each move, one for the key. All rows are read before one is written: who goes
/// down takes the place of who goes down from there.
template <class T>
__global__ void __launch_bounds__(kStepThreads)
    step_down_kernel(const EvictingAttentionArgs args, const CodedCache coded,
                     const Leaving* firsts) {
  __shared__ StepRung rungs[kMostRungs];
  __shared__ Move moves[kMostRungs];
  __shared__ int move_count;
  wait_for_predecessor();
  const kvlab_cache& cache = args.cache;
  const Pair pair = pair_of(static_cast<int>(blockIdx.x), cache.kv_heads);
  if (args.now[pair.sequence] == kIdle) return;
  const DeviceLadder& ladder = coded.ladders[pair.index];
  std::int32_t* const counts = coded.counts + pair.index * kMostRungs;
  std::uint32_t* const places = coded.places + cache.first_slot[pair.index];
  if (room_at(args.policy, pair.index) == kUnlimited ||
      static_cast<std::uint32_t>(counts[0]) < ladder.rung[0].slots) {
    if (threadIdx.x == 0) coded.next_rows[pair.index] = static_cast<std::uint32_t>(counts[0]);
    return;
  }
  if (const int r = static_cast<int>(threadIdx.x); r < ladder.rungs) {
    const Leaving first = firsts[pair.index * kMostRungs + r];
    rungs[r] = {first, first.slot < 0 ? 0 : places[first.slot], ladder.rung[r].first_row,
                ladder.rung[r].slots, static_cast<std::uint32_t>(counts[r])};
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    coded.next_rows[pair.index] = rungs[0].row;
    move_count = chain_of(rungs, ladder.rungs, moves);
    coded.extents[pair.index] =
        extent_of(ladder, [&](int r) { return static_cast<std::int32_t>(rungs[r].tokens); });
  }
  __syncthreads();
  if (const int r = static_cast<int>(threadIdx.x); r < ladder.rungs)
    counts[r] = static_cast<std::int32_t>(rungs[r].tokens);
  const int mine = static_cast<int>(threadIdx.x) / (2 * kWarpSize);
  const bool key = threadIdx.x / kWarpSize % 2 == 0, moves_one = mine < move_count;
  const RowShape shape(cache, sizeof(T));
  const Move move = moves[moves_one ? mine : 0];
  CodedRow row;
  int to = 0;
  if (moves_one) {
    const int from = rung_of(ladder, move.from);
    to = rung_of(ladder, move.to);
    load_part<T>(row, part_at(coded, ladder, move.from, key, shape), ladder.rung[from].form, key,
                 shape.blocks);
    step_down(row, ladder, from, to, key, shape.blocks);
  }
  __syncthreads();
  if (!moves_one) return;
  store_part<T>(row, part_at(coded, ladder, move.to, key, shape), ladder.rung[to].form, key,
                shape.blocks);
  if (key && code_lane() == 0) {
    places[move.slot] = move.to;
    coded.owners[ladder.first_row + move.to] = static_cast<std::uint32_t>(move.slot);
  }
}

// --- An admission
// ---------------------------------------------------------------------------------

/// Tokens of one rung by their number among those that stay, in the order of leaving; the others
/// come last.
struct RungKeys {
  LeavingKeys all;
  const std::int32_t *sources, *levels;
  int rung;

  __device__ LeavingKey operator[](std::uint32_t i) const {
    if (levels[i] != rung) return {kLeavingBins - 1, ~std::uint64_t{0}, ~0u};
    return all[static_cast<std::uint32_t>(sources[i])];
  }
};

/// How many of a rung there are. By the whole block.
__device__ std::uint32_t count_level(const std::int32_t* levels, std::uint32_t tokens, int rung) {
  __shared__ std::uint32_t of_warps[kDealThreads / kWarpSize];
  std::uint32_t own = 0;
  for (std::uint32_t i = threadIdx.x; i < tokens; i += kDealThreads) own += levels[i] == rung;
  const std::uint32_t count = block_sum(own, of_warps);
  __syncthreads();
  return count;
}

/// Of a rung's tokens the first to leave go down, so that it has `room` at most. By the whole
/// block.
__device__ void go_down(SelectionShared& shared, const RungKeys& keys, std::int32_t* levels,
                        std::uint32_t tokens, std::uint32_t room) {
  const std::uint32_t count = count_level(levels, tokens, keys.rung);
  if (count <= room) return;
  LeavingThreshold threshold{};
  if (room > 0) threshold = select_leaving(shared, keys, tokens, count - room);
  for (std::uint32_t i = threadIdx.x; i < tokens; i += kDealThreads)
    if (levels[i] == keys.rung && (room == 0 || threshold.leaves(keys[i])))
      levels[i] = keys.rung + 1;
  __syncthreads();
}

/// A block for each pair, behind the choice of who stays: which rung, and which row there.
__global__ void __launch_bounds__(kDealThreads)
    deal_stayers(const __grid_constant__ kvlab_shrink_args args, const CodedCache coded,
                 const StagedCodes staged) {
  __shared__ SelectionShared shared;
  const ShrinkPair pair(args, static_cast<int>(blockIdx.x));
  if (pair.idle()) return;
  const DeviceLadder& ladder = coded.ladders[pair.index];
  const std::int64_t line = std::int64_t{pair.index} * args.from.most_slots;
  const ShrinkWorkspace workspace = shrink_parts(args);
  const std::int32_t* const sources = workspace.sources + line;
  std::int32_t* const levels = workspace.holes + line;
  const auto kept = static_cast<std::uint32_t>(args.to.lengths[pair.index]);
  for (std::uint32_t i = threadIdx.x; i < kept; i += kDealThreads)
    levels[i] = max(int{staged.rungs[line + sources[i]]}, 0);
  __syncthreads();

  const kvlab_rule rule = args.policy.rules[pair.index];
  const std::uint32_t most = room_at(args.policy, pair.index), live = pair.live();
  const bool leaving = kept < live;
  const bool full = most != kUnlimited &&
                    count_level(levels, kept, 0) >= ladder.rung[0].slots + (most - rule.budget);
  if (leaving || full) {
    const std::uint32_t waiting = leaving ? 0 : max(live, rule.budget - 1) - (rule.budget - 1);
    const LeavingKeys all{workspace.ranks + line, args.from.positions + pair.first_slot,
                          guards_of(rule), pair.now + pair.admitted};
    for (int r = 0; r + 1 < ladder.rungs; ++r)
      go_down(shared, {all, sources, levels, r}, levels, kept,
              ladder.rung[r].slots + (r == 0 ? waiting - 1 : 0));
  }
  for (int r = 0; r < ladder.rungs; ++r) {
    const auto place = [&](std::uint32_t i, bool here, std::uint32_t before) {
      if (!here) return;
      const std::uint32_t row = ladder.rung[r].first_row + before;
      coded.places[args.to.first_slot[pair.index] + i] = row;
      coded.owners[ladder.first_row + row] = i;
    };
    number_stayers(
        shared, kept, [&](std::uint32_t i) { return levels[i] == r; }, place);
    const std::uint32_t count = count_level(levels, kept, r);
    if (threadIdx.x != 0) continue;
    coded.counts[pair.index * kMostRungs + r] = static_cast<std::int32_t>(count);
    if (r == 0) coded.next_rows[pair.index] = count;
  }
  if (threadIdx.x == 0)
    coded.extents[pair.index] =
        extent_of(ladder, [&](int r) { return coded.counts[pair.index * kMostRungs + r]; });
}

/// Where a warp of move_rows is.
struct MovedRow {
  int pair;
  std::int64_t i;  ///< among those that stay
  bool key, wanted;
  std::int64_t source, from, to;  ///< slot in `from`; it and i among all slots there

  __device__ explicit MovedRow(const kvlab_shrink_args& args)
      : pair(static_cast<int>(blockIdx.y)),
        i(std::int64_t{blockIdx.x} * kTokensOfBlock + threadIdx.x / (2 * kWarpSize)),
        key(threadIdx.x / kWarpSize % 2 == 0),
        wanted(args.now[pair / args.from.kv_heads] != kIdle && i < args.to.lengths[pair]) {
    if (!wanted) return;
    source = shrink_parts(args).sources[std::int64_t{pair} * args.from.most_slots + i];
    from = args.from.first_slot[pair] + source;
    to = args.to.first_slot[pair] + i;
  }
};

template <class T>
__device__ T* row_in(const kvlab_cache& cache, std::int64_t slot, bool key) {
  return static_cast<T*>(key ? cache.keys : cache.values) + slot * cache.head_size;
}

/// Of a staged token, where a lane's code and a block's metadata lie.
__device__ std::int64_t staged_at(std::int64_t slot, bool key, int block, const RowShape& shape) {
  return (slot * 2 + (key ? 0 : 1)) * shape.blocks + block;
}

template <class T>
__global__ void __launch_bounds__(kMoveThreads)
    take_rows(const __grid_constant__ kvlab_shrink_args args, const CodedCache coded,
              const StagedCodes staged) {
  const MovedRow at(args);
  if (!at.wanted) return;
  const RowShape shape(args.from, sizeof(T));
  const DeviceLadder& ladder = coded.ladders[at.pair];
  const std::uint32_t place = coded.places[at.from];
  const int rung = rung_of(ladder, place);
  const DeviceForm form = ladder.rung[rung].form;
  CodedRow row;
  load_part<T>(row, part_at(coded, ladder, place, at.key, shape), form, at.key, shape.blocks);
  if (at.key && code_lane() == 0) staged.rungs[at.to] = static_cast<std::int8_t>(rung);
  if (!form.exact()) {
#pragma unroll
    for (int b = 0; b < kMostBlocks; ++b) {
      if (b >= shape.blocks) break;
      const std::int64_t block = staged_at(at.to, at.key, b, shape);
      staged.codes[block * kWarpSize + code_lane()] = static_cast<std::uint8_t>(row.code[b]);
      if (code_lane() == 0) staged.metadata[block] = row.metadata[b];
    }
    butterflies(row, shape.blocks);
#pragma unroll
    for (float& y : row.y) y /= kCodeBlock;
  }
  store_exact(row, row_in<T>(args.to, at.to, at.key), shape.blocks);
}

template <class T>
__global__ void __launch_bounds__(kMoveThreads)
    move_to_rungs(const __grid_constant__ kvlab_shrink_args args, const CodedCache coded,
                  const StagedCodes staged) {
  const MovedRow at(args);
  if (!at.wanted) return;
  const RowShape shape(args.from, sizeof(T));
  const DeviceLadder& ladder = coded.ladders[at.pair];
  const int own = staged.rungs[at.from];
  CodedRow row;
  if (own < 0 || ladder.rung[own].form.exact()) {
    load_exact(row, row_in<T>(args.from, at.from, at.key), shape.blocks);
  } else {
#pragma unroll
    for (int b = 0; b < kMostBlocks; ++b) {
      if (b >= shape.blocks) break;
      const std::int64_t block = staged_at(at.from, at.key, b, shape);
      row.code[b] = staged.codes[block * kWarpSize + code_lane()];
      row.metadata[b] = staged.metadata[block];
      row.y[b] = decoded(ladder.rung[own].form.floating, row.code[b], row.metadata[b]);
    }
  }
  const std::uint32_t place = coded.places[at.to];
  const int rung = rung_of(ladder, place);
  step_down(row, ladder, own, rung, at.key, shape.blocks);
  store_part<T>(row, part_at(coded, ladder, place, at.key, shape), ladder.rung[rung].form, at.key,
                shape.blocks);
}

dim3 move_grid(const kvlab_cache& to, int pairs) {
  return {static_cast<unsigned>((to.most_slots + kTokensOfBlock - 1) / kTokensOfBlock),
          static_cast<unsigned>(pairs)};
}
int pairs_of(const kvlab_cache& cache) { return cache.sequences * cache.kv_heads; }

}  // namespace

cudaError_t place_newest(const kvlab_cache& cache, const CodedCache& coded,
                         const std::uint32_t* now, cudaStream_t stream) {
  DeviceLimits limits;
  if (const cudaError_t error = device_limits(limits)) return error;
  return with_type(cache.type, [&]<class T>(T) {
    const auto kernel = place_newest_kernel<T>;
    if (const cudaError_t error = allow_shared_memory(kernel, limits)) return error;
    return launch(limits, kernel,
                  {static_cast<unsigned>(pairs_of(cache)),
                   static_cast<unsigned>(2 * cache.head_size), 0, stream},
                  cache, coded, now);
  });
}

cudaError_t step_down_pairs(const EvictingAttentionArgs& args, const Leaving* firsts,
                            cudaStream_t stream) {
  DeviceLimits limits;
  if (const cudaError_t error = device_limits(limits)) return error;
  const CodedCache& coded = *args.coded;
  return with_type(args.cache.type, [&]<class T>(T) {
    return launch(limits, step_down_kernel<T>,
                  {static_cast<unsigned>(pairs_of(args.cache)),
                   static_cast<unsigned>(2 * kWarpSize * (coded.most_rungs - 1)), 0, stream},
                  args, coded, firsts);
  });
}

cudaError_t take_from_rungs(const DevicePolicy& policy, const kvlab_shrink_args& args,
                            const CodedCache& coded, const StagedCodes& staged,
                            cudaStream_t stream) {
  if (const cudaError_t error = shrink(policy, args, stream, false)) return error;
  return with_type(args.from.type, [&]<class T>(T) {
    take_rows<T><<<move_grid(args.from, pairs_of(args.from)), kMoveThreads, 0, stream>>>(
        args, coded, staged);
    return cudaGetLastError();
  });
}

cudaError_t shrink_to_rungs(const DevicePolicy& policy, const kvlab_shrink_args& args,
                            const CodedCache& coded, const StagedCodes& staged,
                            cudaStream_t stream) {
  if (const cudaError_t error = shrink(policy, args, stream, false)) return error;
  const int pairs = pairs_of(args.from);
  deal_stayers<<<static_cast<unsigned>(pairs), kDealThreads, 0, stream>>>(args, coded, staged);
  if (const cudaError_t error = cudaGetLastError()) return error;
  return with_type(args.from.type, [&]<class T>(T) {
    move_to_rungs<T><<<move_grid(args.to, pairs), kMoveThreads, 0, stream>>>(args, coded, staged);
    return cudaGetLastError();
  });
}

}  // namespace kvlab::kernels
