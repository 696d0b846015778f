// The second pass with warpgroup products (sm_90a). It works as in prefill_observe.cu, with two
// differences. First, the tensor cores multiply the next tile of queries while the current tile is
// counted. Second, the copy engine loads the tiles. Without the copy engine, a third of the
// instructions of the counting threads were copies.
//
// Instantiated for 2 types x 4 head sizes x 4 kinds of count (32 kernels), for sm_90a only.
#include <cuda.h>

#include <algorithm>

#include "kernels/device/bulk_copy.cuh"
#include "kernels/device/element.cuh"
#include "kernels/device/softmax_state.cuh"
#include "kernels/device/tensor_core.cuh"
#include "kernels/device/warpgroup.cuh"
#include "kernels/prefill/prefill_observe.cuh"

namespace kvlab::kernels::observe {
namespace {

/// Number of warpgroups of a CTA that sum the statistics of keys (counting threads). One more warp
/// loads tiles. At head size 256 the number is lower, because a warp's keys need twice as many
/// registers.
template <int kDim>
constexpr int kWarpgroups = kDim > 128 ? 2 : 3;
constexpr int kKeysOfWarpgroup = 64;  ///< 16 per warp
template <int kDim>
constexpr int kKeys = kWarpgroups<kDim>* kKeysOfWarpgroup;
template <int kDim>
constexpr int kCounting = kWarpgroups<kDim> * 128;  ///< number of counting threads
template <int kDim>
constexpr int kThreads = kCounting<kDim> + 32;  ///< includes the warp that loads tiles
constexpr int kStages = 5;                      ///< tiles in shared memory

template <class T, int kDim>
struct Shared {
  static constexpr int kPanels = (kDim + 63) / 64;
  union {
    T keys[kKeys<kDim> * kDim];  // used until the first queries arrive
    unsigned char queries[kStages][kPanels][kQueries * Panel::kRowBytes];
  };
  RowTerm terms[kStages][kQueries];
  PhaseBarrier full[kStages], free[kStages];
};
constexpr std::size_t kAlignment = 1024;  ///< alignment of panels, in bytes

/// One warp's 16 keys, as operands in registers, and their counts. Lane l counts key l / 4 (half 0)
/// and key l / 4 + 8 (half 1), each for queries l % 4 * 2 and l % 4 * 2 + 1 of every eight queries.
template <class T, int kDim, Count kCount>
class WarpKeys {
 public:
  __device__ explicit WarpKeys(const T* keys) {
    using Layout = Swizzled<kDim * sizeof(T)>;
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d)
      load_matrices(keys_[d],
                    shared_address(keys) + Layout::offset(lane() % 16, d * 2 + lane() / 16));
  }

  /// Starts the products with a tile of queries.
  __device__ void start(std::uint32_t queries, float (&product)[kQueries / 2]) const {
    fence_products();
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      const std::uint32_t panel = queries + d / 4 * (kQueries * Panel::kRowBytes);
      multiply_add_64<T>(product, keys_[d], Panel::describe(panel, d % 4), d > 0);
    }
    commit_products();
  }

  /// Clears the products of queries from `there` on. These queries belong to another sequence, and
  /// their products may be NaN.
  __device__ static void cut(float (&product)[kQueries / 2], int there) {
#pragma unroll
    for (int i = 0; i < kQueries / 2; ++i)
      if (i / 4 * 8 + lane() % 4 * 2 + i % 2 >= there) product[i] = 0;
  }

  /// Counts a tile. The key of `half` is visible to queries from visible(half) on.
  template <bool kMasked, class Visible>
  __device__ void count(const float (&product)[kQueries / 2], const RowTerm* terms,
                        float base2_scale, Visible visible) {
#pragma unroll
    for (int n = 0; n < kQueries / 8; ++n) {
      const int query = n * 8 + lane() % 4 * 2;
      const auto both = *reinterpret_cast<const float4*>(terms + query);
      const RowTerm term[2] = {{both.x, both.y}, {both.z, both.w}};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float p = exp2_fast(fmaf(product[n * 4 + i], base2_scale, term[i % 2].minus_lse2));
        if constexpr (kMasked)
          if (query + i % 2 < visible(i / 2)) p = kUnseen<kCount>;
        count_[i / 2].add(p, term[i % 2], n * 2 + i % 2);
      }
    }
    ++tiles_;
  }

  __device__ void end_queries(int first_query, const RowTerm* terms) {
#pragma unroll
    for (int half = 0; half < 2; ++half) count_[half].end_queries(first_query, terms, query_of_bit);
  }

  /// Calls write(key, count) once for each key, in one lane.
  template <class Write>
  __device__ void finish(Write write) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      count_[half].reduce(tiles_ * (kQueries / 4), 3);
      if (lane() % 4 == 0) write(half * 8 + lane() / 4, count_[half]);
    }
  }

 private:
  __device__ static int lane() { return threadIdx.x % 32; }

  std::uint32_t keys_[kDim / 16][4];
  KeyCount<kCount> count_[2];
  std::uint32_t tiles_ = 0;
};

/// A tile of queries: its first query, the number of its query head in the group, and the stage
/// (buffer in shared memory) that holds it. The tiles of the same queries under all heads of the
/// group come one after another, and then those of the next kQueries queries.
struct Tile {
  int query, head = 0, stage = 0;
  std::uint32_t round = 0;  ///< number of times that all stages have been used, modulo 2
  __device__ void next(int group) {
    if (++stage == kStages) {
      stage = 0;
      round ^= 1;
    }
    if (++head < group) return;
    head = 0;
    query += kQueries;
  }
};

/// The work of the loading thread. It loads each tile. Then it marks two more tiles as loaded
/// without loading them, because the counting warps start the products of up to two tiles beyond
/// the last one and would wait for these tiles.
template <class T, int kDim>
__device__ void fetch_tiles(Shared<T, kDim>& shared, const Plan& plan, const Part& part,
                            const CUtensorMap& queries) {
  constexpr std::uint32_t kTermBytes = kQueries * sizeof(RowTerm);
  Tile tile{part.begin};
  for (; tile.query < part.end; tile.next(plan.group)) {
    PhaseBarrier& full = shared.full[tile.stage];
    shared.free[tile.stage].wait(tile.round ^ 1);
    publish_to_products();  // a barrier alone does not order the copy engine's writes after earlier
                            // reads of the stage
    full.arrive_and_expect(sizeof shared.queries[0] + kTermBytes);
    const int head = part.kv_head * plan.group + tile.head;
#pragma unroll
    for (int panel = 0; panel < Shared<T, kDim>::kPanels; ++panel)
      copy_box(shared.queries[tile.stage][panel], queries, panel * 64, head,
               part.own.begin + tile.query, full);
    copy_bulk(shared.terms[tile.stage], part.terms(plan, head, tile.query), kTermBytes, full);
  }
  for (int empty = 0; empty < 2; ++empty, tile.next(plan.group)) {
    shared.free[tile.stage].wait(tile.round ^ 1);
    shared.full[tile.stage].arrive();
  }
}

/// The work of one counting warp.
template <class T, int kDim, Count kCount>
__device__ void count_tiles(Shared<T, kDim>& shared, const Plan& plan, const Part& part,
                            WarpKeys<T, kDim, kCount>& warp, int warp_key) {
  Tile started{part.begin}, counted = started;
  const auto start = [&](float(&product)[kQueries / 2]) {
    shared.full[started.stage].wait(started.round);
    warp.start(shared_address(shared.queries[started.stage]), product);
    started.next(plan.group);
  };
  const auto finish = [&](float(&product)[kQueries / 2]) {
    wait_products<0>();
    take_products(product);
  };
  const int last_key = part.first_key + warp_key + 15 - part.first;
  const auto count = [&](float(&product)[kQueries / 2]) {
    const int there = part.end - counted.query;
    if (plan.args.prefill.first_query != nullptr && there < kQueries) warp.cut(product, there);
    const auto visible = [&](int half) {
      return last_key - 15 + half * 8 + static_cast<int>(threadIdx.x) % 32 / 4 - counted.query;
    };
    const RowTerm* terms = shared.terms[counted.stage];
    if (last_key <= counted.query)
      warp.template count<false>(product, terms, plan.base2_scale, visible);
    else
      warp.template count<true>(product, terms, plan.base2_scale, visible);
    if (counted.head == plan.group - 1) warp.end_queries(counted.query, terms);
    __syncwarp();
    if (threadIdx.x % 32 == 0) shared.free[counted.stage].arrive();
    counted.next(plan.group);
  };

  float even[kQueries / 2] = {}, odd[kQueries / 2] = {};
  start(even);
  finish(even);
  while (counted.query < part.end) {
    start(odd);  // beyond the last tile this multiplies arbitrary memory; the result is not counted
    count(even);
    finish(odd);
    start(even);
    if (counted.query < part.end) count(odd);
    finish(even);
  }
}

template <class T, int kDim, Count kCount>
__global__ void __launch_bounds__(kThreads<kDim>, 1)
    observe_warpgroups(const __grid_constant__ Plan plan,
                       const __grid_constant__ CUtensorMap queries) {
  extern __shared__ unsigned char memory[];
  const std::uint32_t unaligned = shared_address(memory) % kAlignment;
  auto& shared =
      *reinterpret_cast<Shared<T, kDim>*>(memory + (unaligned == 0 ? 0 : kAlignment - unaligned));
  const auto& args = plan.args;
  const Part part(plan, kKeys<kDim>);
  if (part.begin >= part.end) return;

  using KeyLayout = Swizzled<kDim * sizeof(T)>;
  constexpr int kChunks = KeyLayout::kChunks;
  const T* keys = static_cast<const T*>(args.prefill.keys);
  for (int i = threadIdx.x; i < kKeys<kDim> * kChunks; i += kThreads<kDim>) {
    const bool wanted = i / kChunks < part.keys;
    copy_async(shared_address(shared.keys) + KeyLayout::offset(i / kChunks, i % kChunks),
               keys + (wanted ? part.key_row(args, i / kChunks) + i % kChunks * 8 : 0), wanted);
  }
  commit_copies();
  if (threadIdx.x == 0)
    for (int stage = 0; stage < kStages; ++stage) {
      shared.full[stage].init(1);
      shared.free[stage].init(kCounting<kDim> / 32);
    }
  wait_copies<0>();
  publish_to_products();
  __syncthreads();
  const int warp_key = min(static_cast<int>(threadIdx.x) / 32 * 16, kKeys<kDim> - 16);
  WarpKeys<T, kDim, kCount> warp(shared.keys + warp_key * kDim);
  __syncthreads();  // the keys are in registers now, so their memory is free
  if (threadIdx.x >= kCounting<kDim>) {
    if (threadIdx.x == kCounting<kDim>) fetch_tiles(shared, plan, part, queries);
    return;
  }
  count_tiles(shared, plan, part, warp, warp_key);
  kvlab_observation* const seen = args.seen + part.key_index(args) + warp_key;
  warp.finish([&](int key, const KeyCount<kCount>& given) {
    if (warp_key + key < part.keys) given.add_to(seen[key], part.position(args));
  });
}

/// Makes a tensor map of q [query, query_head, dim]. A copy with it brings 64 channels (a panel) of
/// kQueries queries of one head. Elements beyond the edges of q arrive as zeros.
cudaError_t describe_queries(const kvlab_observe_args& args, CUtensorMap& map) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             12000, cudaEnableDefault, &found);
  if (error != cudaSuccess) return error;
  if (found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  const kvlab_prefill_args& prefill = args.prefill;
  const auto dim = static_cast<cuuint64_t>(prefill.head_size);
  const auto heads = static_cast<cuuint64_t>(prefill.query_heads);
  const int queries = queries_of(prefill);
  const cuuint64_t sizes[] = {dim, heads, static_cast<cuuint64_t>(queries)};
  const cuuint64_t strides[] = {dim * 2, dim * 2 * heads};  // in bytes
  const cuuint32_t box[] = {64, 1, kQueries}, steps[] = {1, 1, 1};
  const CUresult encoded = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function)(
      &map,
      prefill.type == KVLAB_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      3, const_cast<void*>(prefill.q), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return encoded == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <class T, int kDim, Count kCount>
cudaError_t launch(const Plan& plan, cudaStream_t stream) {
  constexpr std::size_t kBytes = sizeof(Shared<T, kDim>) + kAlignment;
  const cudaError_t allowed = cudaFuncSetAttribute(
      observe_warpgroups<T, kDim, kCount>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (allowed != cudaSuccess) return allowed;
  CUtensorMap queries;
  if (const cudaError_t error = describe_queries(plan.args, queries); error != cudaSuccess)
    return error;
  observe_warpgroups<T, kDim, kCount>
      <<<grid(plan, kKeys<kDim>), kThreads<kDim>, kBytes, stream>>>(plan, queries);
  return cudaGetLastError();
}

template <class T, int kDim>
cudaError_t launch(const Plan& plan, Count count, cudaStream_t stream) {
  switch (count) {
    case Count::mass:
      return launch<T, kDim, Count::mass>(plan, stream);
    case Count::weighted:
      return launch<T, kDim, Count::weighted>(plan, stream);
    case Count::largest:
      return launch<T, kDim, Count::largest>(plan, stream);
    case Count::requests:
      return launch<T, kDim, Count::requests>(plan, stream);
  }
  return cudaErrorInvalidValue;
}

template <class T>
cudaError_t launch(const Plan& plan, Count count, cudaStream_t stream) {
  switch (plan.args.prefill.head_size) {
    case 64:
      return launch<T, 64>(plan, count, stream);
    case 96:
      return launch<T, 96>(plan, count, stream);
    case 128:
      return launch<T, 128>(plan, count, stream);
    default:
      return launch<T, 256>(plan, count, stream);
  }
}

}  // namespace

bool has_hopper_code() {
  cudaFuncAttributes code{};
  if (cudaFuncGetAttributes(&code, observe_warpgroups<__half, 64, Count::mass>) == cudaSuccess)
    return code.ptxVersion >= 90;
  cudaGetLastError();
  return false;
}

cudaError_t observe_on_hopper(const Plan& plan, Count count, cudaStream_t stream) {
  return plan.args.prefill.type == KVLAB_BF16 ? launch<__nv_bfloat16>(plan, count, stream)
                                              : launch<__half>(plan, count, stream);
}

}  // namespace kvlab::kernels::observe
