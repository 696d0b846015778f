// The part of a shrink that knows no policy: from ranks to who stays, then the move.
//
// Bytes: choosing reads 12 a live token some times over (from the L2 cache); the move reads and
// writes what stays: 4 * head_size * bytes_of(type) and a state for each token, the floor.
#include "kernels/device/reduce.cuh"
#include "kernels/launch.cuh"
#include "kernels/shrink.cuh"

namespace kvlab::kernels {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kBins = 256;
constexpr int kHistograms = 8;  ///< copies, so that warps seldom add to the same bin

/// The rule's order, 98 bits: guard, rank, position. No two tokens of a pair are equal.
struct Keys {
  const std::uint64_t* ranks;
  const std::uint32_t* positions;
  Guards guards;
  std::uint32_t next;  ///< position to be admitted next

  __device__ LeavingKey operator[](std::uint32_t i) const {
    return {guards.guard(positions[i], next), ranks[i], positions[i]};
  }
};

/// The guard, the 8 bytes of the rank, the 4 of the position, from the most significant.
constexpr int kDigits = 13;
__device__ std::uint32_t digit_of(const LeavingKey& key, int digit) {
  if (digit == 0) return key.guard;
  if (digit <= 8) return static_cast<std::uint32_t>(key.rank >> (8 - digit) * 8) & 0xff;
  return key.position >> (12 - digit) * 8 & 0xff;
}
/// The key with all digits from `digits` on zero.
__device__ LeavingKey leading(LeavingKey key, int digits) {
  if (digits < 1) key.guard = 0;
  if (digits < 9) key.rank = digits <= 1 ? 0 : key.rank >> (9 - digits) * 8 << (9 - digits) * 8;
  if (digits < 13)
    key.position = digits <= 9 ? 0 : key.position >> (13 - digits) * 8 << (13 - digits) * 8;
  return key;
}
__device__ bool equal(const LeavingKey& a, const LeavingKey& b) {
  return a.guard == b.guard && a.rank == b.rank && a.position == b.position;
}

/// A threshold: exactly the tokens that come before it in the order leave, when only the first
/// `digits` of a key count.
struct Threshold {
  LeavingKey key;
  int digits;
  __device__ bool leaves(const LeavingKey& other) const { return leading(other, digits) < key; }
};

struct SelectionShared {
  std::uint32_t histogram[kHistograms][kBins];
  std::uint32_t bin, before;  ///< the bin with the token sought, and how many of its prefix precede
  std::uint32_t warps[kWarps];
};

/// The bin of the token that `before_it` others of the same prefix precede. By the whole block.
__device__ void find_bin(SelectionShared& shared, std::uint32_t before_it) {
  __shared__ std::uint32_t sums[kBins / kWarpSize];
  const int bin = threadIdx.x, lane = bin % kWarpSize;
  std::uint32_t own = 0, upto = 0;
  if (bin < kBins) {
    for (int copy = 0; copy < kHistograms; ++copy) own += shared.histogram[copy][bin];
    upto = own;
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const std::uint32_t other = __shfl_up_sync(~0u, upto, distance);
      if (lane >= distance) upto += other;
    }
    if (lane == kWarpSize - 1) sums[bin / kWarpSize] = upto;
  }
  __syncthreads();
  if (bin < kBins) {
    for (int warp = 0; warp < bin / kWarpSize; ++warp) upto += sums[warp];
    if (upto - own <= before_it && before_it < upto) {
      shared.bin = static_cast<std::uint32_t>(bin);
      shared.before = upto - own;
    }
  }
  __syncthreads();
}

/// Radix selection: the threshold before which `leaving` of the `live` tokens come. By the whole
/// block; 0 < leaving < live.
__device__ Threshold select(SelectionShared& shared, const Keys& keys, std::uint32_t live,
                            std::uint32_t leaving) {
  Threshold found{{}, 0};
  std::uint32_t before_it = leaving;  // tokens of the same prefix before the first that stays
  for (int digit = 0; digit < kDigits && before_it > 0; ++digit) {
    for (int i = threadIdx.x; i < kHistograms * kBins; i += kThreads)
      (&shared.histogram[0][0])[i] = 0;
    __syncthreads();
    auto& histogram = shared.histogram[threadIdx.x / kWarpSize % kHistograms];
    for (std::uint32_t i = threadIdx.x; i < live; i += kThreads) {
      const LeavingKey key = keys[i];
      if (equal(leading(key, digit), found.key)) atomicAdd(&histogram[digit_of(key, digit)], 1u);
    }
    __syncthreads();
    find_bin(shared, before_it);
    const std::uint64_t bin = shared.bin;
    if (digit == 0)
      found.key.guard = static_cast<std::uint32_t>(bin);
    else if (digit <= 8)
      found.key.rank |= bin << (8 - digit) * 8;
    else
      found.key.position |= static_cast<std::uint32_t>(bin) << (12 - digit) * 8;
    found.digits = digit + 1;
    before_it -= shared.before;
    __syncthreads();
  }
  return found;
}

/// Calls each(slot, stays, how many before it stay) for the slots of [0, live). By the whole block;
/// `stays` is asked twice. Each warp has a run of slots.
template <class Stays, class Each>
__device__ void number_stayers(SelectionShared& shared, std::uint32_t live, Stays stays,
                               Each each) {
  const std::uint32_t lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const std::uint32_t run = (live + kThreads - 1) / kThreads * kWarpSize;
  const std::uint32_t begin = min(warp * run, live), end = min(begin + run, live);
  std::uint32_t count = 0;
  for (std::uint32_t i = begin + lane; i - lane < end; i += kWarpSize)
    count += __popc(__ballot_sync(~0u, i < end && stays(i)));
  if (lane == 0) shared.warps[warp] = count;
  __syncthreads();
  std::uint32_t before = 0;
  for (std::uint32_t w = 0; w < warp; ++w) before += shared.warps[w];
  for (std::uint32_t i = begin + lane; i - lane < end; i += kWarpSize) {
    const bool own = i < end && stays(i);
    const std::uint32_t mask = __ballot_sync(~0u, own);
    if (i < end) each(i, own, before + __popc(mask & ((1u << lane) - 1)));
    before += __popc(mask);
  }
  __syncthreads();
}

/// Who stays, and where to: a block for each pair.
__global__ void __launch_bounds__(kThreads)
    choose_stayers(const __grid_constant__ ShrinkArgs args, bool in_place) {
  __shared__ SelectionShared shared;
  const ShrinkPair pair(args, static_cast<int>(blockIdx.x));
  if (pair.idle()) return;
  const std::uint32_t live = pair.live();
  const PairRule rule = args.policy.rules[pair.index];
  const std::uint32_t kept = rule.budget == kUnlimited ? live : min(live, rule.budget - 1);
  const std::size_t row = std::size_t(pair.index) * args.from.most_slots;
  const ShrinkWorkspace workspace = shrink_parts(args);
  const Keys keys{workspace.ranks + row,
                  args.from.positions + pair.first_slot,
                  {.sinks = rule.sinks, .recent = rule.recent},
                  pair.now + pair.admitted};
  std::int32_t* const sources = workspace.sources + row;
  std::int32_t* const holes = workspace.holes + row;

  if (kept > 0) {
    const Threshold threshold =
        kept == live ? Threshold{{}, 0} : select(shared, keys, live, live - kept);
    const auto stays = [&](std::uint32_t i) { return !threshold.leaves(keys[i]); };
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
    // As many stay beyond `kept` as leave before it: the n-th of them goes to the n-th hole.
    const auto fill_hole = [&](std::uint32_t i, bool stays_here, std::uint32_t before) {
      if (!stays_here || i < kept) return;
      const std::uint32_t fills = kept - before - 1;  // counted from the last
      sources[holes[fills]] = static_cast<std::int32_t>(i);
    };
    number_stayers(shared, live, stays, note_source);
    if (in_place && kept < live) number_stayers(shared, live, stays, fill_hole);
  }
  __syncthreads();  // lengths may be those that were read
  if (threadIdx.x == 0) {
    args.to.lengths[pair.index] = static_cast<std::int32_t>(kept);
    args.to.next_slots[pair.index] = static_cast<std::int32_t>(kept);
  }
}

/// Moves what stays: a thread for each 16 bytes of a key, and of the value beside it.
__global__ void __launch_bounds__(kShrinkThreads)
    move_stayers(const __grid_constant__ ShrinkArgs args, int slot_bytes, int chunks,
                 bool in_place) {
  const int pair = static_cast<int>(blockIdx.y);
  if (args.now[pair / args.from.kv_heads] == kIdle) return;
  const std::int64_t i = std::int64_t{blockIdx.x} * kShrinkThreads + threadIdx.x;
  const std::int64_t slot = i / chunks, chunk = i % chunks;
  if (slot >= args.to.lengths[pair]) return;
  const std::int64_t source =
      shrink_parts(args).sources[std::int64_t{pair} * args.from.most_slots + slot];
  if (in_place && source == slot) return;
  const std::int64_t from = args.from.first_slot[pair] + source;
  const std::int64_t to = args.to.first_slot[pair] + slot;
  const auto move = [&](const void* source_rows, void* target_rows) {
    static_cast<uint4*>(target_rows)[to * chunks + chunk] =
        static_cast<const uint4*>(source_rows)[from * chunks + chunk];
  };
  move(args.from.keys, args.to.keys);
  move(args.from.values, args.to.values);
  if (chunk != 0) return;
  args.to.positions[to] = args.from.positions[from];
  for (int byte = 0; byte < slot_bytes; ++byte)
    args.to_states[to * slot_bytes + byte] = args.policy.states[from * slot_bytes + byte];
}

bool same_shape(const SlotCache& a, const SlotCache& b) {
  return a.type == b.type && a.sequences == b.sequences && a.kv_heads == b.kv_heads &&
         a.head_size == b.head_size;
}

bool whole(const SlotCache& cache) {
  return cache.keys != nullptr && cache.values != nullptr && cache.positions != nullptr &&
         cache.lengths != nullptr && cache.next_slots != nullptr && cache.first_slot != nullptr &&
         aligned16(cache.keys) && aligned16(cache.values);
}

}  // namespace

std::size_t shrink_workspace(const SlotCache& from) {
  return std::size_t(from.sequences) * from.kv_heads * from.most_slots *
         (sizeof(std::uint64_t) + 2 * sizeof(std::int32_t));
}

namespace {

/// Whether the arguments can be a shrink's; pointers are not followed.
bool can_shrink(const ShrinkArgs& args, std::size_t slot_bytes) {
  constexpr int kMostPairs = 65535;  // of a grid's second dimension
  const SlotCache& from = args.from;
  if (from.sequences < 1 || from.kv_heads < 1 || from.most_slots < 1) return false;
  if (std::int64_t{from.sequences} * from.kv_heads > kMostPairs) return false;
  if (from.head_size * bytes_of(from.type) % 16 != 0 || from.head_size < 1) return false;
  if (slot_bytes != 0 && (args.policy.states == nullptr || args.to_states == nullptr)) return false;
  return same_shape(from, args.to) && whole(from) && whole(args.to) && args.workspace != nullptr &&
         args.now != nullptr && args.admitted != nullptr && args.policy.rules != nullptr &&
         args.policy.seeds != nullptr && args.policy.sequence_ids != nullptr;
}

/// The rest of a shrink, once the workspace holds every live token's rank.
cudaError_t keep_last_to_leave(const ShrinkArgs& args, std::size_t slot_bytes,
                               cudaStream_t stream) {
  const bool in_place = args.from.keys == args.to.keys;
  const auto pairs = static_cast<unsigned>(args.from.sequences * args.from.kv_heads);
  choose_stayers<<<pairs, kThreads, 0, stream>>>(args, in_place);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  const int chunks = static_cast<int>(args.from.head_size * bytes_of(args.from.type) / 16);
  const std::int64_t most = std::int64_t{args.to.most_slots} * chunks;
  const dim3 grid(static_cast<unsigned>((most + kShrinkThreads - 1) / kShrinkThreads), pairs);
  move_stayers<<<grid, kShrinkThreads, 0, stream>>>(args, static_cast<int>(slot_bytes), chunks,
                                                    in_place);
  return cudaGetLastError();
}

}  // namespace

cudaError_t AdmissionPolicy::shrink(const ShrinkArgs& args, cudaStream_t stream) const {
  if (!can_shrink(args, slot_bytes)) return cudaErrorInvalidValue;
  const dim3 grid((args.from.most_slots + kShrinkThreads - 1) / kShrinkThreads,
                  args.from.sequences * args.from.kv_heads);
  ShrinkArgs first = args;
  void* parameters[] = {&first};
  if (const cudaError_t error =
          cudaLaunchKernel(kernel, grid, dim3(kShrinkThreads), parameters, 0, stream);
      error != cudaSuccess)
    return error;
  return keep_last_to_leave(args, slot_bytes, stream);
}

}  // namespace kvlab::kernels
