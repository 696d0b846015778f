// Decode attention over rungs: pair_attention's, whose row of tiles has each pair's rungs one
// behind the other. A tile's codes lie together, as its warp's copies take them. Floor: the bytes
// of the rows over the read bandwidth.
//
// Instantiated: 2 types x 4 head sizes, for four query heads and for eight. Forms are read where
// the kernel runs.
#include "kernels/codes/rung_attention.hpp"

#include "kernels/codes/rung_warp.cuh"
#include "kernels/decode/pair_attention.cuh"
#include "kernels/device/bulk_copy.cuh"
#include "kernels/launch_plans.hpp"

namespace kvlab::kernels {
namespace {

constexpr int kMostStages = 6, kFewestStages = 2;  // one, where two do not fit

struct RungPlan {
  PairPlan pairs;
  CodedCache coded;
  std::int64_t logit_slots;  ///< of PairRows::logits
  int stage_bytes, exchange_bytes;
};
constexpr int kOwnerBytes = static_cast<int>(kRowsOfTile * sizeof(std::uint32_t));

/// Of a rung, the tiles that a warp takes of its CTA's share of a pair.
struct RungRun {
  DeviceForm form;
  int tiles;          ///< each kSlotsPerTile rows behind the one before it
  int rows;           ///< in use, from the first tile's first on
  std::uint32_t row;  ///< that one, among the pair's
  const std::byte* from;
  int row_bytes;
  const std::uint32_t* owners;  // of the first tile's rows
};

/// Rungs of a pair, and which of its tiles a CTA has.
class PairRungs {
 public:
  __device__ PairRungs(const RungPlan& plan, const SlotsOfPair& slots, int tile, int end)
      : coded_(&plan.coded), slots_(slots), tile_(tile), end_(end) {}
  __device__ int count() const { return ladder().rungs; }
  __device__ DeviceForm form(int r) const { return ladder().rung[r].form; }
  template <class Warp>
  __device__ RungRun run(int r) const {
    const DeviceRung rung = ladder().rung[r];
    int rows = coded_->counts[slots_.pair * kMostRungs + r];
    if (r == 0) rows = max(rows, slots_.newest + 1);  // it may be about to come
    const int before = static_cast<int>(rung.first_row) -
                       static_cast<int>(threadIdx.x) / 32 * Warp::kKeys + kSlotsPerTile - 1;
    const int first = max(tile_, before / kSlotsPerTile),
              end = min(end_, (before + rows) / kSlotsPerTile);
    const int row = first * kSlotsPerTile + static_cast<int>(threadIdx.x) / 32 * Warp::kKeys,
              in_rung = row - static_cast<int>(rung.first_row),
              bytes = static_cast<int>(
                  row_bytes(rung.form, Warp::kHeadSize, sizeof(typename Warp::Element)));
    return {rung.form,
            max(end - first, 0),
            rows - in_rung,
            static_cast<std::uint32_t>(row),
            coded_->bytes + rung.first_byte + std::int64_t{in_rung} * bytes,
            bytes,
            coded_->owners + ladder().first_row + row};
  }

 private:
  __device__ const DeviceLadder& ladder() const { return coded_->ladders[slots_.pair]; }
  const CodedCache* coded_;
  SlotsOfPair slots_;
  int tile_, end_;
};

/// A warp's tiles, fetched ahead to a ring of pairs.stages: codes by the copy engine.
template <class Warp>
class RungTiles {
 public:
  /// `count`: tiles of the CTA's share, from the cursor on.
  __device__ RungTiles(const RungPlan& plan, unsigned char* ring, PhaseBarrier* arrived,
                       const TileCursor& cursor, int count)
      : plan_(plan),
        ring_(ring),
        arrived_(arrived),
        cursor_(cursor),
        left_(count),
        policy_(cache_policy(plan.pairs.read_once)),
        rungs_(share_of_pair()) {
    if (threadIdx.x % 32 == 0) {
      for (int i = 0; i < plan.pairs.stages; ++i) arrived_[i].init(1);
#if __CUDA_ARCH__ >= 900
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
    }
    __syncwarp();
    for (int i = 0; i < plan.pairs.stages - 1; ++i) fetch();
  }
  /// The next tile; the one before it is overwritten.
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

  __device__ PairRungs share_of_pair() {
    const int first = cursor_.tile, tiles = min(left_, cursor_.slots.tiles() - first);
    left_ -= tiles;
    rung_ = 0;
    return {plan_, cursor_.slots, first, first + tiles};
  }
  /// To the next rung that has tiles, if there is one.
  __device__ bool find_run() {
    while (run_.tiles == 0) {
      if (rung_ == rungs_.count()) {
        if (left_ == 0) return false;
        cursor_.next_pair(plan_.pairs.args.table, kDim);
        rungs_ = share_of_pair();
      }
      run_ = rungs_.template run<Warp>(rung_++);
      const int behind = cursor_.slots.newest - static_cast<int>(run_.row);
      newest_ =
          behind >= 0 && behind % kSlotsPerTile < kRows ? run_.tiles - behind / kSlotsPerTile : 0;
    }
    return true;
  }
  /// Starts copying, if there is a tile left.
  __device__ void fetch() {
    if (run_.tiles == 0 && !find_run()) return;
    unsigned char* const tile = ring_ + write_ * plan_.stage_bytes;
    PhaseBarrier& arrives = arrived_[write_];
    write_ = write_ + 1 == plan_.pairs.stages ? 0 : write_ + 1;
    if (run_.tiles == newest_) wait_for_predecessor();  // the newest token's tile
    if (run_.form.exact()) {
      const auto* const keys = reinterpret_cast<const T*>(run_.from);
      reinterpret_cast<typename Warp::Tile*>(tile + kOwnerBytes)
          ->template load_slots<false>(keys, keys + kRows * kDim, 0, run_.rows, policy_);
      copy_chunks(tile, run_.owners, kOwnerBytes / 16);
      arrive_when_copied(arrives);
    } else {
      fetch_codes(tile, arrives);
    }
    run_.from += std::int64_t{kSlotsPerTile} * run_.row_bytes;
    run_.owners += kSlotsPerTile;
    run_.rows -= kSlotsPerTile;
    --run_.tiles;
  }
  __device__ void fetch_codes(unsigned char* tile, PhaseBarrier& arrives) const {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x % 32 != 0) return;
    const auto bytes = static_cast<std::uint32_t>(run_.row_bytes) * kRows;
    const bool owned = plan_.pairs.args.rows.logits != nullptr;
    arrives.arrive_and_expect(bytes + (owned ? kOwnerBytes : 0));
    copy_bulk(tile + kOwnerBytes, run_.from, bytes, arrives, policy_);
    if (owned) copy_bulk(tile, run_.owners, kOwnerBytes, arrives, policy_);
#else
    copy_chunks(tile + kOwnerBytes, run_.from, run_.row_bytes);
    copy_chunks(tile, run_.owners, kOwnerBytes / 16);
    arrive_when_copied(arrives);
#endif
  }
  /// Each of 16 bytes.
  __device__ void copy_chunks(unsigned char* to, const void* from, int count) const {
    for (int i = static_cast<int>(threadIdx.x) % 32; i < count; i += 32)
      copy_async(shared_address(to) + static_cast<std::uint32_t>(i) * 16,
                 static_cast<const std::byte*>(from) + i * 16, true, policy_);
  }
  /// One lane arrives: that of all 32 took longer than a tile's products.
  __device__ static void arrive_when_copied(PhaseBarrier& arrives) {
    arrives.expect_copied();
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrives.arrive();
  }

  const RungPlan& plan_;
  unsigned char* ring_;
  PhaseBarrier* arrived_;
  TileCursor cursor_;
  int left_;  ///< tiles of the share behind this pair's
  CachePolicy policy_;
  int rung_;  ///< the next one
  PairRungs rungs_;
  RungRun run_{};
  int newest_ = 0;  ///< run_.tiles at the newest token's tile
  int read_ = 0, write_ = 0;
  unsigned parity_ = 0;
};

/// Shows all of a run's tiles to add(tile, rows in use, their slots).
template <class Warp, class Add>
__device__ void for_tiles(RungTiles<Warp>& tiles, RungRun run, Add add) {
  for (; run.tiles > 0; --run.tiles) {
    const unsigned char* const tile = tiles.next();
    add(tile + kOwnerBytes, run.rows, reinterpret_cast<const std::uint32_t*>(tile));
    run.rows -= kSlotsPerTile;
  }
}
template <class Form, class Warp, class State>
__device__ void add_codes(RungTiles<Warp>& tiles, const RungRun& run, State& state,
                          const RungUse& use) {
  state.template begin<Form>();
  for_tiles(tiles, run, [&](const unsigned char* tile, int rows, const std::uint32_t* owners) {
    state.template add<Form>(tile, rows, owners, use);
  });
}

/// A warp's tiles of a pair, to its part.
template <class Warp, int kQuads>
__device__ void add_pair(RungTiles<Warp>& tiles, const PairRungs& rungs, const TurnedQuery& turned,
                         const typename Warp::Element* query, int group, const RungUse& use,
                         const WarpPart& part) {
  const int count = rungs.count();
  int r = 0;
  if (rungs.form(0).exact()) {
    Warp state;
    state.start(query, group);
    for (; r < count && rungs.form(r).exact(); ++r)
      for_tiles(tiles, rungs.template run<Warp>(r),
                [&](const unsigned char* tile, int rows, const std::uint32_t* owners) {
                  state.add(*reinterpret_cast<const typename Warp::Tile*>(tile), rows, owners, use);
                });
    state.finish(part);
  }
  if (r == count) return;
  CodedWarp<Warp::kHeadSize, kQuads> state(turned, group, use.base2_scale, part, r > 0);
  for (; r < count; ++r) {
    const RungRun run = rungs.template run<Warp>(r);
    if (run.tiles == 0) continue;
    if (run.form.floating)
      add_codes<CodedForm<8, 8, true>>(tiles, run, state, use);
    else if (run.form.key_bits == 8)
      add_codes<CodedForm<8, 8>>(tiles, run, state, use);
    else if (run.form.value_bits == 4)
      add_codes<CodedForm<4, 4>>(tiles, run, state, use);
    else if (run.form.key_bits == 4)
      add_codes<CodedForm<4, 2>>(tiles, run, state, use);
    else
      add_codes<CodedForm<2, 2>>(tiles, run, state, use);
  }
  state.finish(part);
}

template <class Warp, int kQuads>
__global__ void __launch_bounds__(kThreads) attend_rungs(const __grid_constant__ RungPlan plan) {
  extern __shared__ __align__(16) unsigned char memory[];
  constexpr int kDim = Warp::kHeadSize;
  const PairAttention& args = plan.pairs.args;
  const int stages = plan.pairs.stages, ring_bytes = stages * plan.stage_bytes,
            warp = threadIdx.x / 32;
  const Exchange<kDim> exchange{args.group, reinterpret_cast<float*>(memory + kWarps * ring_bytes)};
  const TurnedQuery turned(
      reinterpret_cast<float*>(memory + kWarps * ring_bytes + plan.exchange_bytes), args.group,
      kDim);
  auto* const arrived =
      reinterpret_cast<PhaseBarrier*>(memory + kWarps * ring_bytes + plan.exchange_bytes +
                                      (TurnedQuery::bytes(args.group, kDim) + 7) / 8 * 8) +
      warp * stages;
  if (!args.settled) wait_for_predecessor();
  const TileRow row(args.table);
  const EvenShare share(row.total(), plan.pairs.ctas);
  int left = share.begin(blockIdx.x + 1) - share.begin(blockIdx.x);
  __syncthreads();  // all of the CTA knows its share: what follows in the stream may change lengths
  let_successor_start();
  if (left == 0) {
    wait_for_predecessor();
    return;
  }

  int at = share.begin(blockIdx.x);  // in the row
  TileCursor cursor = row.at(at, kDim);
  RungTiles<Warp> tiles(plan, memory + warp * ring_bytes, arrived, cursor, left);
  wait_for_predecessor();
  for (bool first = true; left > 0; first = false) {
    if (!first) cursor.next_pair(args.table, kDim);
    const SlotsOfPair& slots = cursor.slots;
    const int count = min(left, slots.tiles() - cursor.tile);
    const auto* const query = static_cast<const typename Warp::Element*>(args.q) +
                              std::int64_t{slots.pair} * args.group * kDim;
    if (!first) __syncthreads();  // the pair before has been read
    for (int i = threadIdx.x; i < args.group * kDim; i += kThreads) turned.set(i, query[i]);
    __syncthreads();
    RungUse use{.logits = nullptr,
                .logits_stride = logits_stride(args.group),
                .base2_scale = plan.pairs.base2_scale};
    if (args.rows.logits != nullptr)
      use.logits = args.rows.logits + slots.pair * plan.logit_slots * use.logits_stride;
    add_pair<Warp, kQuads>(tiles, PairRungs(plan, slots, cursor.tile, cursor.tile + count), turned,
                           query, args.group, use, exchange.part(warp));
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

/// f<Warp>() for the type and head size.
template <class F>
cudaError_t with_rung_warp(const PairAttention& args, F&& f) {
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

int stage_bytes(int most_row_bytes) {
  return kOwnerBytes + static_cast<int>(kRowsOfTile) * most_row_bytes;
}
int exchange_bytes(int group, int head_size) {
  const auto of_size = [&]<int kDim>() { return static_cast<int>(Exchange<kDim>::bytes(group)); };
  switch (head_size) {
    case 64:
      return of_size.template operator()<64>();
    case 96:
      return of_size.template operator()<96>();
    case 128:
      return of_size.template operator()<128>();
    default:
      return of_size.template operator()<256>();
  }
}
/// Of a CTA, behind its ring.
int bytes_beside(int group, int head_size) {
  return exchange_bytes(group, head_size) +
         static_cast<int>((TurnedQuery::bytes(group, head_size) + 7) / 8 * 8 +
                          sizeof(PhaseBarrier) * kWarps * kMostStages);
}

}  // namespace

/// Two CTAs share a multiprocessor where they can.
LaunchPlan rung_attention_plan(const PairAttention& args, int most_row_bytes,
                               const DeviceLimits& limits) {
  const int beside = bytes_beside(args.group, args.head_size),
            of_stage = kWarps * stage_bytes(most_row_bytes),
            room = shared_of_all(limits) / 2 - kReserved - beside;
  const auto bytes = [&](int stages) { return stages * of_stage + beside; };
  int stages = std::clamp(room / of_stage, kFewestStages, kMostStages);
  if (bytes(stages) > limits.shared_bytes) stages = 1;
  const int on_one = std::min(shared_of_all(limits) / (bytes(stages) + kReserved), 2);
  const int ctas = static_cast<int>(
      std::min<std::int64_t>({most_tiles(args), on_one * limits.multiprocessors, kMostCtas}));
  return {.blocks = on_one == 0 ? 0 : for_whole_pairs(ctas, args.table.pairs),
          .stages = stages,
          .shared_bytes = static_cast<std::size_t>(bytes(stages))};
}

std::size_t rung_attention_workspace(const PairAttention& args) {
  return sizeof(Signals) +
         part_rows(args, kMostCtas) *
             (static_cast<std::size_t>(args.head_size) * sizeof(float) + sizeof(float2));
}

cudaError_t rung_attention(PairAttention args, const CodedCache& coded, cudaStream_t stream) {
  if (args.group < 1 || args.group > kMostRungGroup || args.table.pairs < 1 ||
      args.table.pairs > kMostPairs || !args.q || !args.out || !args.workspace)
    return cudaErrorInvalidValue;
  DeviceLimits limits;
  if (const cudaError_t error = device_limits(limits)) return error;
  const std::int64_t logit_slots = row_slots(args.table.most_slots);
  if (coded.most_rungs > 1) {  // rows for slots
    args.table.lengths = coded.extents;
    args.table.next_slots = reinterpret_cast<const std::int32_t*>(coded.next_rows);
  }
  args.table.most_slots = coded.most_rows;
  const LaunchPlan how = rung_attention_plan(args, coded.most_row_bytes, limits);
  if (!how.fits()) return cudaErrorNotSupported;  // why_not_rung_attention() says why
  return with_rung_warp(args, [&]<class Warp>() {
    auto* const signals = static_cast<Signals*>(args.workspace);
    auto* const part_out = reinterpret_cast<float*>(signals + 1);
    RungPlan plan{};
    plan.coded = coded;
    plan.logit_slots = logit_slots;
    plan.exchange_bytes = exchange_bytes(args.group, args.head_size);
    plan.stage_bytes = stage_bytes(coded.most_row_bytes);
    plan.pairs = {.args = args,
                  .ctas = how.blocks,
                  .base2_scale = args.softmax_scale * kLog2E,
                  .part_out = part_out,
                  .part_state = reinterpret_cast<float2*>(part_out + part_rows(args, kMostCtas) *
                                                                         Warp::kHeadSize),
                  .arrived = signals->arrived,
                  .stages = how.stages,
                  .read_once = true,
                  .paged = {}};
    constexpr int kQuad = 4;
    const auto kernel = args.group <= kQuad ? attend_rungs<Warp, 1> : attend_rungs<Warp, 2>;
    if (const cudaError_t error = allow_shared_memory(kernel, limits)) return error;
    return launch(limits, kernel, {plan.pairs.ctas, kThreads, how.shared_bytes, stream}, plan);
  });
}

}  // namespace kvlab::kernels
