// The second pass by warpgroup products (sm_90a): as prefill_observe.cu has it, but the tensor
// cores work on the next tile of queries while this one is counted.
#include <algorithm>

#include "kernels/device/element.cuh"
#include "kernels/device/softmax_state.cuh"
#include "kernels/device/tensor_core.cuh"
#include "kernels/device/warpgroup.cuh"
#include "kernels/prefill_observe.cuh"

namespace kvlab::kernels::observe {
namespace {

constexpr int kGroups = 3;        ///< warpgroups of a CTA
constexpr int kKeysOfGroup = 64;  ///< 16 of each warp
constexpr int kKeys = kGroups * kKeysOfGroup;
constexpr int kThreads = kGroups * 128;
constexpr int kAhead = 2;            ///< tiles that are on their way when one's products start
constexpr int kStages = kAhead + 2;  ///< as many, the one in products and the one being counted

template <class T, int kDim>
struct Shared {
  static constexpr int kPanels = (kDim + 63) / 64;
  union {
    T keys[kKeys * kDim];  // before the first queries
    unsigned char queries[kStages][kPanels][kQueries * Panel::kRowBytes];
  };
  RowTerm terms[kStages][kQueries];
};
constexpr std::size_t kAlignment = 1024;  ///< of panels

/// One warp's 16 keys, as operands in registers, and what they are given. Lane l has keys l / 4 and
/// the eighth after that; columns l % 4 * 2 and the next of each eight queries.
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

  /// Counts a tile; visible(half): queries before this one do not see the key.
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

  __device__ void end_queries(int first_query) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      count_[half].end_queries(
          [&](int bit) { return first_query + bit / 2 * 8 + lane() % 4 * 2 + bit % 2; });
  }

  /// Calls write(key, count) for each key, by one lane.
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

/// Where a tile is: its queries, its query head of the group, its stage. Heads change first.
struct Tile {
  int query, head, stage;
  __device__ void next(int group) {
    stage = (stage + 1) % kStages;
    if (++head < group) return;
    head = 0;
    query += kQueries;
  }
};

template <class T, int kDim, Count kCount>
__global__ void __launch_bounds__(kThreads, 1) observe_groups(const __grid_constant__ Plan plan) {
  extern __shared__ unsigned char memory[];
  const std::uint32_t unaligned = shared_address(memory) % kAlignment;
  auto& shared =
      *reinterpret_cast<Shared<T, kDim>*>(memory + (unaligned == 0 ? 0 : kAlignment - unaligned));
  const auto& args = plan.args;
  const Part part(plan, kKeys);
  if (part.begin >= part.end) return;

  using KeyLayout = Swizzled<kDim * sizeof(T)>;
  constexpr int kChunks = KeyLayout::kChunks;
  const T* keys = static_cast<const T*>(args.keys) + part.key_index(args) * kDim;
  for (int i = threadIdx.x; i < kKeys * kChunks; i += kThreads) {
    const bool wanted = i / kChunks < part.keys;
    copy_async(shared_address(shared.keys) + KeyLayout::offset(i / kChunks, i % kChunks),
               keys + (wanted ? i * 8 : 0), wanted);
  }
  commit_copies();
  wait_copies<0>();
  __syncthreads();
  const int warp_key = threadIdx.x / 32 * 16;
  WarpKeys<T, kDim, kCount> warp(shared.keys + warp_key * kDim);
  __syncthreads();  // the keys are in registers, their place is free

  const std::int64_t stride = std::int64_t{args.shape.query_heads} * kDim;
  Tile fetched{part.begin, 0, 0}, counted = fetched;
  const auto fetch = [&] {
    if (fetched.query < part.end) {
      const int head = part.kv_head * plan.group + fetched.head;
      const int valid = args.queries - fetched.query;
      const T* from = static_cast<const T*>(args.q) + fetched.query * stride + head * kDim;
#pragma unroll
      for (int i = threadIdx.x; i < kQueries * kChunks; i += kThreads) {
        const int row = i / kChunks, chunk = i % kChunks;
        const bool wanted = row < valid;
        copy_async(shared_address(shared.queries[fetched.stage][chunk / Panel::kChunks]) +
                       Panel::offset(row, chunk % Panel::kChunks),
                   from + (wanted ? row * stride + chunk * 8 : 0), wanted);
      }
      constexpr int kTermsAtOnce = 16 / sizeof(RowTerm);
      if (threadIdx.x < kQueries / kTermsAtOnce)
        copy_async(shared_address(shared.terms[fetched.stage]) + threadIdx.x * 16,
                   plan.terms + std::int64_t{head} * plan.padded + fetched.query +
                       threadIdx.x * kTermsAtOnce,
                   true);
    }
    commit_copies();
    fetched.next(plan.group);
  };
  int started = 0;  // stage
  const auto start = [&](float(&product)[kQueries / 2]) {
    wait_copies<kAhead - 1>();
    publish_to_products();
    __syncthreads();  // the tile is there; the one before the last has been counted
    warp.start(shared_address(shared.queries[started]), product);
    started = (started + 1) % kStages;
    fetch();
  };
  const auto count = [&](const float(&product)[kQueries / 2]) {
    const int last_key = part.first_key + warp_key + 15 - part.first;
    const auto visible = [&](int half) {
      return last_key - 15 + half * 8 + static_cast<int>(threadIdx.x) % 32 / 4 - counted.query;
    };
    const RowTerm* terms = shared.terms[counted.stage];
    if (last_key <= counted.query)
      warp.template count<false>(product, terms, plan.base2_scale, visible);
    else
      warp.template count<true>(product, terms, plan.base2_scale, visible);
    if (counted.head == plan.group - 1) warp.end_queries(counted.query);
    counted.next(plan.group);
  };
  const auto finish = [&](float(&product)[kQueries / 2]) {
    wait_products<0>();
    take_products(product);
  };

  for (int tile = 0; tile < kAhead; ++tile) fetch();
  float even[kQueries / 2] = {}, odd[kQueries / 2] = {};
  start(even);
  finish(even);
  while (counted.query < part.end) {
    start(odd);  // beyond the last tile: of what lies there, not counted
    count(even);
    finish(odd);
    start(even);
    if (counted.query < part.end) count(odd);
    finish(even);
  }

  Observation* const seen = args.seen + part.key_index(args) + warp_key;
  warp.finish([&](int key, const KeyCount<kCount>& given) {
    if (warp_key + key < part.keys) given.add_to(seen[key], args.position);
  });
}

template <class T, int kDim, Count kCount>
cudaError_t launch(const Plan& plan, cudaStream_t stream) {
  constexpr std::size_t kBytes = sizeof(Shared<T, kDim>) + kAlignment;
  const cudaError_t allowed = cudaFuncSetAttribute(
      observe_groups<T, kDim, kCount>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (allowed != cudaSuccess) return allowed;
  observe_groups<T, kDim, kCount><<<grid(plan, kKeys), kThreads, kBytes, stream>>>(plan);
  return cudaGetLastError();
}

template <class T, int kDim>
cudaError_t launch(const Plan& plan, Count count, cudaStream_t stream) {
  switch (count) {
    case Count::mass:
      return launch<T, kDim, Count::mass>(plan, stream);
    case Count::weighted:
      return launch<T, kDim, Count::weighted>(plan, stream);
    case Count::requests:
      return launch<T, kDim, Count::requests>(plan, stream);
  }
  return cudaErrorInvalidValue;
}

template <class T>
cudaError_t launch(const Plan& plan, Count count, cudaStream_t stream) {
  switch (plan.args.shape.head_size) {
    case 64:
      return launch<T, 64>(plan, count, stream);
    case 96:
      return launch<T, 96>(plan, count, stream);
    default:
      return launch<T, 128>(plan, count, stream);
  }
}

}  // namespace

cudaError_t observe_on_hopper(const Plan& plan, Count count, cudaStream_t stream) {
  return plan.args.shape.type == Type::bf16 ? launch<__nv_bfloat16>(plan, count, stream)
                                            : launch<__half>(plan, count, stream);
}

}  // namespace kvlab::kernels::observe
