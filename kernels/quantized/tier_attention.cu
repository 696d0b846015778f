// Decode attention over tiers. It works like pair_attention: the tiles of all pairs form one row of
// tiles, which is divided evenly among the CTAs. In this row, the tiers of a pair come one after
// another. A warp processes kRowsOfTile rows of a tier at a time; their bytes are contiguous, so
// the warp copies them as one piece. Lower bound of the time: the bytes of the rows in use, divided
// by the memory's read bandwidth.
//
// Instantiated for 2 types x 4 head sizes x 2 group sizes (up to four query heads, and up to
// eight). Formats are chosen at run time.
#include "kernels/quantized/tier_attention.hpp"

#include "kernels/decode/pair_attention.cuh"
#include "kernels/device/bulk_copy.cuh"
#include "kernels/launch_plans.hpp"
#include "kernels/quantized/tier_warp.cuh"

namespace kvlab::kernels {
namespace {

constexpr int kMaxStages = 6, kMinStages = 2;  // if two stages do not fit, one is used

struct TierAttentionPlan {
  PairPlan pairs;
  QuantizedCache quantized_cache;
  std::int64_t logit_slots;  ///< slots of PairRows::logits
  int stage_bytes, exchange_bytes;
};
constexpr int kSlotIndexBytes = static_cast<int>(kRowsOfTile * sizeof(std::uint32_t));

/// The tiles that a warp handles of one tier, within the tiles of a pair that are its CTA's share.
struct TierRun {
  DeviceFormat format;
  int tiles;          ///< number of tiles; each begins kSlotsPerTile rows after the previous one,
                      ///< because the rows between them belong to the CTA's other warps
  int rows;           ///< number of rows in use, from the first row of the first tile on
  std::uint32_t row;  ///< first row of the first tile, among the pair's rows
  const std::byte* from;
  int row_bytes;
  const std::uint32_t* slot_of_row;  // slots of the rows, from the first tile on
};

/// The tiers of a pair, limited to those tiles of the pair that the CTA handles.
class PairTiers {
 public:
  __device__ PairTiers(const TierAttentionPlan& plan, const SlotsOfPair& slots, int tile, int end)
      : quantized_cache_(&plan.quantized_cache), slots_(slots), tile_(tile), end_(end) {}
  __device__ int count() const { return tier_plan().tiers; }
  __device__ DeviceFormat format(int r) const { return tier_plan().tier[r].format; }
  template <class Warp>
  __device__ TierRun run(int r) const {
    const DeviceTier tier = tier_plan().tier[r];
    int rows = quantized_cache_->counts[slots_.pair * kMaxDeviceTiers + r];
    if (r == 0)
      rows = max(rows, slots_.newest + 1);  // the count may not include the newest token yet
    const int before = static_cast<int>(tier.first_row) -
                       static_cast<int>(threadIdx.x) / 32 * Warp::kKeys + kSlotsPerTile - 1;
    const int first = max(tile_, before / kSlotsPerTile),
              end = min(end_, (before + rows) / kSlotsPerTile);
    const int row = first * kSlotsPerTile + static_cast<int>(threadIdx.x) / 32 * Warp::kKeys,
              tier_row = row - static_cast<int>(tier.first_row),
              bytes = static_cast<int>(
                  row_bytes(tier.format, Warp::kHeadSize, sizeof(typename Warp::Element)));
    return {tier.format,
            max(end - first, 0),
            rows - tier_row,
            static_cast<std::uint32_t>(row),
            quantized_cache_->bytes + tier.first_byte + std::int64_t{tier_row} * bytes,
            bytes,
            quantized_cache_->slot_of_row + tier_plan().first_row + row};
  }

 private:
  __device__ const DeviceTierPlan& tier_plan() const {
    return quantized_cache_->tier_plans[slots_.pair];
  }
  const QuantizedCache* quantized_cache_;
  SlotsOfPair slots_;
  int tile_, end_;
};

/// Loads a warp's tiles in advance, into a ring of pairs.stages stages in shared memory. The copy
/// engine copies quantized tiles if the device has one (sm_90 and later); the warp's lanes copy all
/// others.
template <class Warp>
class TierTiles {
 public:
  /// `count`: number of tiles in the CTA's share, from the cursor on.
  __device__ TierTiles(const TierAttentionPlan& plan, unsigned char* ring, PhaseBarrier* arrived,
                       const TileCursor& cursor, int count)
      : plan_(plan),
        ring_(ring),
        arrived_(arrived),
        cursor_(cursor),
        left_(count),
        policy_(cache_policy(plan.pairs.read_once)),
        tiers_(share_of_pair()) {
    if (threadIdx.x % 32 == 0) {
      for (int i = 0; i < plan.pairs.stages; ++i) arrived_[i].init(1);
#if __CUDA_ARCH__ >= 900
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
    }
    __syncwarp();
    for (int i = 0; i < plan.pairs.stages - 1; ++i) fetch();
  }
  /// Waits for the next tile and returns it. The tile that the previous call returned is
  /// overwritten.
  __device__ const unsigned char* next() {
    __syncwarp();
    fetch();
    const int stage = read_;
    arrived_[stage].wait(parity_);
    if (++read_ == plan_.pairs.stages) read_ = 0, parity_ ^= 1;
    return ring_ + stage * plan_.stage_bytes;
  }

 private:
  using T = typename Warp::Element;
  static constexpr int kDim = Warp::kHeadSize, kRows = Warp::kKeys;

  __device__ PairTiers share_of_pair() {
    const int first = cursor_.tile, tiles = min(left_, cursor_.slots.tiles() - first);
    left_ -= tiles;
    tier_ = 0;
    return {plan_, cursor_.slots, first, first + tiles};
  }
  /// Moves to the next tier that has tiles, if there is one.
  __device__ bool find_run() {
    while (run_.tiles == 0) {
      if (tier_ == tiers_.count()) {
        if (left_ == 0) return false;
        cursor_.next_pair(plan_.pairs.args.table, kDim);
        tiers_ = share_of_pair();
      }
      run_ = tiers_.template run<Warp>(tier_++);
      const int rows_after = cursor_.slots.newest - static_cast<int>(run_.row);
      newest_ = rows_after >= 0 && rows_after % kSlotsPerTile < kRows
                    ? run_.tiles - rows_after / kSlotsPerTile
                    : 0;
    }
    return true;
  }
  /// Starts to copy the next tile, if there is one.
  __device__ void fetch() {
    if (run_.tiles == 0 && !find_run()) return;
    unsigned char* const tile = ring_ + write_ * plan_.stage_bytes;
    PhaseBarrier& arrives = arrived_[write_];
    write_ = write_ + 1 == plan_.pairs.stages ? 0 : write_ + 1;
    if (run_.tiles == newest_) wait_for_predecessor();  // this tile has the newest token
    if (run_.format.exact()) {
      const auto* const keys = reinterpret_cast<const T*>(run_.from);
      reinterpret_cast<typename Warp::Tile*>(tile + kSlotIndexBytes)
          ->template load_slots<false>(keys, keys + kRows * kDim, 0, run_.rows, policy_);
      copy_chunks(tile, run_.slot_of_row, kSlotIndexBytes / 16);
      arrive_when_copied(arrives);
    } else {
      fetch_quantized(tile, arrives);
    }
    run_.from += std::int64_t{kSlotsPerTile} * run_.row_bytes;
    run_.slot_of_row += kSlotsPerTile;
    run_.rows -= kSlotsPerTile;
    --run_.tiles;
  }
  __device__ void fetch_quantized(unsigned char* tile, PhaseBarrier& arrives) const {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x % 32 != 0) return;
    const auto bytes = static_cast<std::uint32_t>(run_.row_bytes) * kRows;
    const bool owned = plan_.pairs.args.rows.logits != nullptr;
    arrives.arrive_and_expect(bytes + (owned ? kSlotIndexBytes : 0));
    copy_bulk(tile + kSlotIndexBytes, run_.from, bytes, arrives, policy_);
    if (owned) copy_bulk(tile, run_.slot_of_row, kSlotIndexBytes, arrives, policy_);
#else
    copy_chunks(tile + kSlotIndexBytes, run_.from, run_.row_bytes);
    copy_chunks(tile, run_.slot_of_row, kSlotIndexBytes / 16);
    arrive_when_copied(arrives);
#endif
  }
  /// Copies `count` chunks of 16 bytes.
  __device__ void copy_chunks(unsigned char* to, const void* from, int count) const {
    for (int i = static_cast<int>(threadIdx.x) % 32; i < count; i += 32)
      copy_async(shared_address(to) + static_cast<std::uint32_t>(i) * 16,
                 static_cast<const std::byte*>(from) + i * 16, true, policy_);
  }
  /// Waits until the copies of all lanes are registered; then one lane arrives at the barrier for
  /// the warp. When all 32 lanes arrived, this took longer than the products of a tile.
  __device__ static void arrive_when_copied(PhaseBarrier& arrives) {
    arrives.expect_copied();
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrives.arrive();
  }

  const TierAttentionPlan& plan_;
  unsigned char* ring_;
  PhaseBarrier* arrived_;
  TileCursor cursor_;
  int left_;  ///< tiles of the CTA's share that belong to later pairs
  CachePolicy policy_;
  int tier_;  ///< the next tier
  PairTiers tiers_;
  TierRun run_{};
  int newest_ = 0;  ///< value of run_.tiles (tiles left) when the tile with the newest token is
                    ///< next; 0: not in this run
  int read_ = 0, write_ = 0;
  unsigned parity_ = 0;
};

/// Calls add(tile, number of rows in use, their slots) for all tiles of a run.
template <class Warp, class Add>
__device__ void for_tiles(TierTiles<Warp>& tiles, TierRun run, Add add) {
  for (; run.tiles > 0; --run.tiles) {
    const unsigned char* const tile = tiles.next();
    add(tile + kSlotIndexBytes, run.rows, reinterpret_cast<const std::uint32_t*>(tile));
    run.rows -= kSlotsPerTile;
  }
}
template <class Format, class Warp, class State>
__device__ void add_quantized(TierTiles<Warp>& tiles, const TierRun& run, State& state,
                              const TierUse& use) {
  state.template begin<Format>();
  for_tiles(tiles, run, [&](const unsigned char* tile, int rows, const std::uint32_t* slot_of_row) {
    state.template add<Format>(tile, rows, slot_of_row, use);
  });
}

/// Processes the tiles of a pair that one warp handles, and writes the warp's partial result to
/// `part`.
template <class Warp, int kHeadGroups>
__device__ void add_pair(TierTiles<Warp>& tiles, const PairTiers& tiers,
                         const HadamardQuery& rotated, const typename Warp::Element* query,
                         int group, const TierUse& use, const WarpPart& part) {
  const int count = tiers.count();
  int r = 0;
  if (tiers.format(0).exact()) {
    Warp state;
    state.start(query, group);
    for (; r < count && tiers.format(r).exact(); ++r)
      for_tiles(tiles, tiers.template run<Warp>(r),
                [&](const unsigned char* tile, int rows, const std::uint32_t* slot_of_row) {
                  state.add(*reinterpret_cast<const typename Warp::Tile*>(tile), rows, slot_of_row,
                            use);
                });
    state.finish(part);
  }
  if (r == count) return;
  QuantizedWarp<Warp::kHeadSize, kHeadGroups> state(rotated, group, use.base2_scale, part, r > 0);
  for (; r < count; ++r) {
    const TierRun run = tiers.template run<Warp>(r);
    if (run.tiles == 0) continue;
    if (run.format.floating)
      add_quantized<QuantFormat<8, 8, true>>(tiles, run, state, use);
    else if (run.format.key_bits == 8)
      add_quantized<QuantFormat<8, 8>>(tiles, run, state, use);
    else if (run.format.value_bits == 4)
      add_quantized<QuantFormat<4, 4>>(tiles, run, state, use);
    else if (run.format.key_bits == 4)
      add_quantized<QuantFormat<4, 2>>(tiles, run, state, use);
    else
      add_quantized<QuantFormat<2, 2>>(tiles, run, state, use);
  }
  state.finish(part);
}

template <class Warp, int kHeadGroups>
__global__ void __launch_bounds__(kThreads)
    attend_tiers(const __grid_constant__ TierAttentionPlan plan) {
  extern __shared__ __align__(16) unsigned char memory[];
  constexpr int kDim = Warp::kHeadSize;
  const PairAttention& args = plan.pairs.args;
  const int stages = plan.pairs.stages, ring_bytes = stages * plan.stage_bytes,
            warp = threadIdx.x / 32;
  const Exchange<kDim> exchange{args.group, reinterpret_cast<float*>(memory + kWarps * ring_bytes)};
  const HadamardQuery rotated(
      reinterpret_cast<float*>(memory + kWarps * ring_bytes + plan.exchange_bytes), args.group,
      kDim);
  auto* const arrived =
      reinterpret_cast<PhaseBarrier*>(memory + kWarps * ring_bytes + plan.exchange_bytes +
                                      (HadamardQuery::bytes(args.group, kDim) + 7) / 8 * 8) +
      warp * stages;
  if (!args.settled) wait_for_predecessor();
  const TileRow row(args.table);
  const EvenShare share(row.total(), plan.pairs.ctas);
  int left = share.begin(blockIdx.x + 1) - share.begin(blockIdx.x);
  // The next kernel may change the lengths, so it may start only when all threads have computed the
  // share
  __syncthreads();
  let_successor_start();
  if (left == 0) {
    wait_for_predecessor();
    return;
  }

  int at = share.begin(blockIdx.x);  // index among all tiles of the launch
  TileCursor cursor = row.at(at, kDim);
  TierTiles<Warp> tiles(plan, memory + warp * ring_bytes, arrived, cursor, left);
  wait_for_predecessor();
  for (bool first = true; left > 0; first = false) {
    if (!first) cursor.next_pair(args.table, kDim);
    const SlotsOfPair& slots = cursor.slots;
    const int count = min(left, slots.tiles() - cursor.tile);
    const auto* const query = static_cast<const typename Warp::Element*>(args.q) +
                              std::int64_t{slots.pair} * args.group * kDim;
    if (!first) __syncthreads();  // all threads have read the part of the previous pair
    for (int i = threadIdx.x; i < args.group * kDim; i += kThreads) rotated.set(i, query[i]);
    __syncthreads();
    TierUse use{.logits = nullptr,
                .logits_stride = logits_stride(args.group),
                .base2_scale = plan.pairs.base2_scale};
    if (args.rows.logits != nullptr)
      use.logits = args.rows.logits + slots.pair * plan.logit_slots * use.logits_stride;
    add_pair<Warp, kHeadGroups>(tiles, PairTiers(plan, slots, cursor.tile, cursor.tile + count),
                                rotated, query, args.group, use, exchange.part(warp));
    __syncthreads();
    const bool whole = count == slots.tiles();
    write_pair<Warp>(plan.pairs, exchange, slots.pair, whole, blockIdx.x * 2 + (first ? 0 : 1));
    if (!whole)
      arrive_and_merge<Warp>(plan.pairs, PairParts(share, at - cursor.tile, slots.tiles()),
                             exchange, slots.pair, PairRows::kNone);
    left -= count;
    at += count;
  }
}

/// Calls f<Warp>() for the type and head size.
template <class F>
cudaError_t with_tier_warp(const PairAttention& args, F&& f) {
  const auto by_size = [&]<class T>() {
    switch (args.head_size) {
      case 64:
        return f.template operator()<ExactWarp<T, 64>>();
      case 96:
        return f.template operator()<ExactWarp<T, 96>>();
      case 128:
        return f.template operator()<ExactWarp<T, 128>>();
      case 256:
        return f.template operator()<ExactWarp<T, 256>>();
      default:
        return cudaErrorInvalidValue;
    }
  };
  if (args.type == KVLAB_BF16) return by_size.template operator()<__nv_bfloat16>();
  return args.type == KVLAB_F16 ? by_size.template operator()<__half>() : cudaErrorInvalidValue;
}

int stage_bytes(int max_row_bytes) {
  return kSlotIndexBytes + static_cast<int>(kRowsOfTile) * max_row_bytes;
}
int exchange_bytes(int group, int head_size) {
  const auto exchange_size = [&]<int kDim>() {
    return static_cast<int>(Exchange<kDim>::bytes(group));
  };
  switch (head_size) {
    case 64:
      return exchange_size.template operator()<64>();
    case 96:
      return exchange_size.template operator()<96>();
    case 128:
      return exchange_size.template operator()<128>();
    default:
      return exchange_size.template operator()<256>();
  }
}
/// Bytes of shared memory that a CTA needs in addition to its rings.
int bytes_beside(int group, int head_size) {
  return exchange_bytes(group, head_size) +
         static_cast<int>((HadamardQuery::bytes(group, head_size) + 7) / 8 * 8 +
                          sizeof(PhaseBarrier) * kWarps * kMaxStages);
}

}  // namespace

/// Plans the launch so that two CTAs run on one multiprocessor, if their shared memory fits.
LaunchPlan tier_attention_plan(const PairAttention& args, int max_row_bytes,
                               const DeviceLimits& limits) {
  const int beside = bytes_beside(args.group, args.head_size),
            block_stage_bytes = kWarps * stage_bytes(max_row_bytes),
            free_bytes = shared_of_all(limits) / 2 - kReserved - beside;
  const auto bytes = [&](int stages) { return stages * block_stage_bytes + beside; };
  int stages = std::clamp(free_bytes / block_stage_bytes, kMinStages, kMaxStages);
  if (bytes(stages) > limits.shared_bytes) stages = 1;
  const int on_one = std::min(shared_of_all(limits) / (bytes(stages) + kReserved), 2);
  const int ctas = static_cast<int>(
      std::min<std::int64_t>({max_tiles(args), on_one * limits.multiprocessors, kMaxCtas}));
  return {.blocks = on_one == 0 ? 0 : for_whole_pairs(ctas, args.table.pairs),
          .stages = stages,
          .shared_bytes = static_cast<std::size_t>(bytes(stages))};
}

std::size_t tier_attention_workspace(const PairAttention& args) {
  return sizeof(Signals) +
         part_rows(args, kMaxCtas) *
             (static_cast<std::size_t>(args.head_size) * sizeof(float) + sizeof(float2));
}

cudaError_t tier_attention(PairAttention args, const QuantizedCache& quantized_cache,
                           cudaStream_t stream) {
  if (args.group < 1 || args.group > kMaxTierGroup || args.table.pairs < 1 ||
      args.table.pairs > kMaxPairs || !args.q || !args.out || !args.workspace)
    return cudaErrorInvalidValue;
  DeviceLimits limits;
  if (const cudaError_t error = device_limits(limits)) return error;
  const std::int64_t logit_slots = row_slots(args.table.max_slots);
  if (quantized_cache.max_tiers >
      1) {  // with several tiers, the tables of the pairs count rows instead of slots
    args.table.lengths = quantized_cache.extents;
    args.table.next_slots = reinterpret_cast<const std::int32_t*>(quantized_cache.next_rows);
  }
  args.table.max_slots = quantized_cache.max_rows;
  const LaunchPlan how = tier_attention_plan(args, quantized_cache.max_row_bytes, limits);
  if (!how.fits()) return cudaErrorNotSupported;  // why_not_tier_attention() returns the reason
  return with_tier_warp(args, [&]<class Warp>() {
    auto* const signals = static_cast<Signals*>(args.workspace);
    auto* const part_out = reinterpret_cast<float*>(signals + 1);
    TierAttentionPlan plan{};
    plan.quantized_cache = quantized_cache;
    plan.logit_slots = logit_slots;
    plan.exchange_bytes = exchange_bytes(args.group, args.head_size);
    plan.stage_bytes = stage_bytes(quantized_cache.max_row_bytes);
    plan.pairs = {.args = args,
                  .ctas = how.blocks,
                  .base2_scale = args.softmax_scale * kLog2E,
                  .part_out = part_out,
                  .part_state = reinterpret_cast<float2*>(part_out + part_rows(args, kMaxCtas) *
                                                                         Warp::kHeadSize),
                  .arrived = signals->arrived,
                  .stages = how.stages,
                  .read_once = true,
                  .paged = {}};
    constexpr int kHeadGroupSize = 4;
    const auto kernel =
        args.group <= kHeadGroupSize ? attend_tiers<Warp, 1> : attend_tiers<Warp, 2>;
    if (const cudaError_t error = allow_shared_memory(kernel, limits)) return error;
    return launch(limits, kernel, {plan.pairs.ctas, kThreads, how.shared_bytes, stream}, plan);
  });
}

}  // namespace kvlab::kernels
