// Decode attention over rungs: pair_attention's, whose row of tiles has each pair's rungs one
// behind the other. A tile's codes lie together, as its warp's copies take them. Floor: the bytes
// of the rows over the read bandwidth.
//
// Instantiated: 2 types x 4 head sizes. Forms are read where the kernel runs.
#include "kernels/codes/rung_attention.hpp"

#include "kernels/codes/rung_warp.cuh"
#include "kernels/decode/pair_attention.cuh"

namespace kvlab::kernels {
namespace {

constexpr int kMostStages = 6, kFewestStages = 2;

struct RungPlan {
  PairPlan pairs;
  CodedCache coded;
  std::int64_t logit_slots;  ///< of PairRows::logits
  int stage_bytes;
};

/// A warp's tiles, fetched ahead to a ring of pairs.stages.
template <class Warp>
class RungTiles {
 public:
  __device__ RungTiles(const RungPlan& plan, unsigned char* ring, const TileCursor& cursor,
                       int count)
      : plan_(plan),
        ring_(ring),
        cursor_(cursor),
        left_(count),
        policy_(cache_policy(plan.pairs.read_once)) {
    find_pair();
    for (int i = 0; i < plan.pairs.stages - 1; ++i) fetch();
  }
  /// The next tile's head, the tile behind it; the one before it is overwritten.
  __device__ const TileHead& next() {
    wait_copies<kMostStages - 2>(plan_.pairs.stages - 2);
    __syncwarp();
    fetch();
    const auto& head = *reinterpret_cast<const TileHead*>(ring_ + read_ * plan_.stage_bytes);
    read_ = read_ + 1 == plan_.pairs.stages ? 0 : read_ + 1;
    return head;
  }

 private:
  static constexpr int kDim = Warp::kHeadSize;
  using T = typename Warp::Element;

  __device__ void find_pair() {
    ladder_ = plan_.coded.ladders + cursor_.slots.pair;
    find_rung(0);
  }
  __device__ void find_rung(int rung) {
    rung_ = rung;
    form_ = ladder_->rung[rung].form;
    first_ = ladder_->rung[rung].first_row;
    end_ = first_ + ladder_->rung[rung].rows;
    count_ = plan_.coded.counts[cursor_.slots.pair * kMostRungs + rung];
    bytes_ = plan_.coded.bytes + ladder_->rung[rung].first_byte;
    row_bytes_ = static_cast<int>(row_bytes(form_, kDim, sizeof(T)));
  }
  /// Starts copying, if there is a tile left. A group of copies in any case.
  __device__ void fetch() {
    unsigned char* const stage = ring_ + write_ * plan_.stage_bytes;
    write_ = write_ + 1 == plan_.pairs.stages ? 0 : write_ + 1;
    if (left_ > 0) {
      if (cursor_.tile == cursor_.slots.tiles()) {
        cursor_.next_pair(plan_.pairs.args.table, kDim);
        find_pair();
      }
      start(stage);
      ++cursor_.tile;
      --left_;
    }
    commit_copies();
  }
  __device__ void start(unsigned char* stage) {
    const int row = cursor_.tile * kSlotsPerTile + static_cast<int>(threadIdx.x) / 32 * Warp::kKeys;
    while (row >= static_cast<int>(end_) && rung_ + 1 < ladder_->rungs) find_rung(rung_ + 1);
    const int in_rung = row - static_cast<int>(first_), valid = min(count_ - in_rung, Warp::kKeys);
    if (threadIdx.x % 32 == 0)
      *reinterpret_cast<TileHead*>(stage) = {form_, valid, static_cast<std::uint32_t>(row)};
    if (valid <= 0) return;
    unsigned char* const tile = stage + sizeof(TileHead);
    const std::byte* const from = bytes_ + std::int64_t{in_rung} * row_bytes_;
    if (form_.exact()) {
      const auto* const keys = reinterpret_cast<const T*>(from);
      reinterpret_cast<typename Warp::Tile*>(tile)->template load_slots<false>(
          keys, keys + Warp::kKeys * kDim, 0, valid, policy_);
      return;
    }
    // As many chunks of 16 bytes as a row has bytes.
    for (int i = static_cast<int>(threadIdx.x) % 32; i < row_bytes_; i += 32)
      copy_async(shared_address(tile) + static_cast<std::uint32_t>(i) * 16, from + i * 16, true,
                 policy_);
  }

  const RungPlan& plan_;
  unsigned char* ring_;
  TileCursor cursor_;
  int left_;
  CachePolicy policy_;
  const DeviceLadder* ladder_;
  int rung_, count_, row_bytes_;
  DeviceForm form_;
  std::uint32_t first_, end_;
  const std::byte* bytes_;
  int read_ = 0, write_ = 0;
};

template <class Warp>
__global__ void __launch_bounds__(kThreads) attend_rungs(const __grid_constant__ RungPlan plan) {
  extern __shared__ __align__(16) unsigned char memory[];
  constexpr int kDim = Warp::kHeadSize;
  const PairAttention& args = plan.pairs.args;
  const int ring_bytes = plan.pairs.stages * plan.stage_bytes, warp = threadIdx.x / 32;
  float* const turned = reinterpret_cast<float*>(memory + kWarps * ring_bytes);
  const Exchange<kDim> exchange{args.group, turned + args.group * kDim};
  wait_for_predecessor();
  const TileRow row(args.table);
  const EvenShare share(row.total(), plan.pairs.ctas);
  int left = share.begin(blockIdx.x + 1) - share.begin(blockIdx.x);
  __syncthreads();  // all of the CTA knows its share: what follows in the stream may change lengths
  let_successor_start();
  if (left == 0) return;

  int at = share.begin(blockIdx.x);  // in the row
  TileCursor cursor = row.at(at, kDim);
  RungTiles<Warp> tiles(plan, memory + warp * ring_bytes, cursor, left);
  Warp state;
  for (bool first = true; left > 0; first = false) {
    if (!first) cursor.next_pair(args.table, kDim);
    const PairSlots& slots = cursor.slots;
    const int count = min(left, slots.tiles() - cursor.tile);
    const auto* const query = static_cast<const typename Warp::Element*>(args.q) +
                              std::int64_t{slots.pair} * args.group * kDim;
    __syncthreads();  // the pair before has been read
    for (int i = threadIdx.x; i < args.group * kDim; i += kThreads)
      turned[i] = butterfly(to_float(query[i])) / kCodeBlock;
    __syncthreads();
    state.start(query, args.group, turned);
    TileUse use{};
    use.logits_stride = logits_stride(args.group);
    if (args.rows.logits != nullptr)
      use.logits = args.rows.logits + slots.pair * plan.logit_slots * use.logits_stride;
    const std::uint32_t* const owners =
        plan.coded.owners + plan.coded.ladders[slots.pair].first_row;
    for (int i = 0; i < count; ++i) {
      const TileHead& head = tiles.next();
      if (head.valid > 0)
        state.add(head, reinterpret_cast<const unsigned char*>(&head + 1), exchange.part(warp),
                  owners, use, plan.pairs.base2_scale);
    }
    state.finish(exchange.part(warp));
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

/// f(Warp{}) for the type and head size.
template <class F>
cudaError_t with_rung_warp(const PairAttention& args, F&& f) {
  const auto by_size = [&]<class T>() {
    switch (args.head_size) {
      case 64:
        return f.template operator()<RungWarp<T, 64>>();
      case 96:
        return f.template operator()<RungWarp<T, 96>>();
      case 128:
        return f.template operator()<RungWarp<T, 128>>();
      case 256:
        return f.template operator()<RungWarp<T, 256>>();
      default:
        return cudaErrorInvalidValue;
    }
  };
  if (args.type == Type::bf16) return by_size.template operator()<__nv_bfloat16>();
  return args.type == Type::f16 ? by_size.template operator()<__half>() : cudaErrorInvalidValue;
}

/// Stages of a warp, so that two CTAs share a multiprocessor where they can; what they take.
template <class Warp>
void choose_stages(const DeviceLimits& limits, RungPlan& plan, int beside) {
  constexpr int kAlign = 16;
  plan.stage_bytes = (static_cast<int>(sizeof(TileHead)) +
                      static_cast<int>(kRowsOfTile) * plan.coded.most_row_bytes + kAlign - 1) /
                     kAlign * kAlign;
  const int room = shared_of_all(limits) / 2 - kReserved - beside;
  plan.pairs.stages = std::clamp(room / (kWarps * plan.stage_bytes), kFewestStages, kMostStages);
}

}  // namespace

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
  args.table.lengths = coded.extents;
  args.table.next_slots = coded.none;
  args.table.most_slots = coded.most_rows;
  return with_rung_warp(args, [&]<class Warp>() {
    auto* const signals = static_cast<Signals*>(args.workspace);
    auto* const part_out = reinterpret_cast<float*>(signals + 1);
    RungPlan plan{};
    plan.coded = coded;
    plan.logit_slots = logit_slots;
    const int beside =
        static_cast<int>(Exchange<Warp::kHeadSize>::bytes(args.group) +
                         static_cast<std::size_t>(args.group * Warp::kHeadSize) * sizeof(float));
    choose_stages<Warp>(limits, plan, beside);
    const int bytes = kWarps * plan.pairs.stages * plan.stage_bytes + beside,
              on_one = std::min(shared_of_all(limits) / (bytes + kReserved), 2);
    if (on_one == 0) return cudaErrorInvalidValue;
    const int stages = plan.pairs.stages,
              ctas = static_cast<int>(std::min<std::int64_t>(
                  {most_tiles(args), on_one * limits.multiprocessors, kMostCtas}));
    plan.pairs = {.args = args,
                  .ctas = for_whole_pairs(ctas, args.table.pairs),
                  .base2_scale = args.softmax_scale * kLog2E,
                  .part_out = part_out,
                  .part_state = reinterpret_cast<float2*>(part_out + part_rows(args, kMostCtas) *
                                                                         Warp::kHeadSize),
                  .arrived = signals->arrived,
                  .stages = stages,
                  .read_once = true,
                  .paged = {}};
    const auto kernel = attend_rungs<Warp>;
    if (const cudaError_t error = allow_shared_memory(kernel, limits)) return error;
    return launch(limits, kernel,
                  {plan.pairs.ctas, kThreads, static_cast<std::size_t>(bytes), stream}, plan);
  });
}

}  // namespace kvlab::kernels
