// Attention statistics of an append: how much attention its queries give to each key. This is a
// second pass, which computes the products of queries and keys again. For each row (one query of
// one query head), the attention has stored the log-sum-exp and the largest product. The
// log-sum-exp converts a product to its final probability at once. The largest product gives the
// lowest probability that is a request.
//
// A CTA keeps a block of keys in registers (float32: in shared memory) and passes over the queries
// that see these keys, one tile of queries after another and, within a tile, one query head after
// another. So the sums of a key stay in the registers of the same lanes. Sums are integers, so CTAs
// with the same keys and different queries may add their sums in any order.
//
// Work: 2 * head_size operations for each (query, query head, visible key), half as many as in the
// attention, plus an exponential and, for masses, six more instructions. Memory traffic is small:
// queries once, keys once per kRange queries, 8 bytes per row (RowTerm) and 24 bytes per key (its
// kvlab_observation).
//
// Instantiated for 4 head sizes x 4 kinds of count: on tensor cores for 2 types (32 kernels), and
// without tensor cores for float32 (16 kernels). The kind of count is a template parameter because
// it determines the registers that a key needs. On sm_90 the 2-byte types have separate kernels;
// those in this file are for other devices.
#include <algorithm>

#include "kernels/device/element.cuh"
#include "kernels/device/softmax_state.cuh"
#include "kernels/device/tensor_core.cuh"
#include "kernels/launch.cuh"
#include "kernels/launch_plans.hpp"
#include "kernels/prefill/prefill_observe.cuh"

namespace kvlab::kernels {
namespace observe {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
constexpr int kKeysOfWarp = 32;
constexpr int kKeys = kWarps * kKeysOfWarp;  ///< keys per CTA
constexpr int kStages = 2;

__host__ __device__ int round_up(int value, int unit) { return (value + unit - 1) / unit * unit; }

/// Computes the row terms of a sequence's queries, beginning with the first tile that contains a
/// counted query. One thread handles one (query, query head).
__global__ void __launch_bounds__(kThreads)
    make_row_terms(const __grid_constant__ Plan plan, Count count) {
  const auto& args = plan.args;
  const Sequence own(args, plan.tail);
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int query = own.silent + static_cast<int>(i / args.prefill.query_heads);
  const int head = static_cast<int>(i % args.prefill.query_heads);
  if (query >= round_up(own.count, kQueries)) return;
  RowTerm term{-INFINITY, INFINITY};
  const auto age = static_cast<std::uint32_t>(own.younger + own.count - 1 - query);
  if (query < own.count && age < plan.tail) {
    const std::int64_t at = own.begin + query;
    const RowSoftmax row = args.prefill.rows[at * args.prefill.query_heads + head];
    term.minus_lse2 = -row.lse2;
    if (count == Count::requests) {
      const float p = exp2_fast(fmaf(row.max_product, plan.base2_scale, -row.lse2));
      term.bound = request_floor(fixed_mass(1, p), args.threshold16[own.sequence]);
    } else {
      term.bound = args.weights != nullptr ? args.weights[age] : 1;
    }
  } else if (count != Count::requests) {
    term.bound = 0;
  }
  plan.terms[std::int64_t{head} * plan.padded + own.term + query] = term;
}

template <class T, int kDim>
struct alignas(16) Shared {
  union {
    T keys[kKeys * kDim];  // used until the first queries arrive
    T queries[kStages][kQueries * kDim];
  };
  RowTerm terms[kStages][kQueries];
};

/// Starts to copy kRows rows [row, dim] to shared memory. Row `row` begins at element begin(row) of
/// `from`. Rows from `valid` on are filled with zeros.
template <class T, int kDim, int kRows, class Begin>
__device__ void load_rows(T* to, const T* from, Begin begin, int valid) {
  using Layout = Swizzled<kDim * sizeof(T)>;
  static_assert(kRows * Layout::kChunks % kThreads == 0);
#pragma unroll
  for (int j = 0; j < kRows * Layout::kChunks; j += kThreads) {
    const int i = j + threadIdx.x;
    const int row = i / Layout::kChunks, chunk = i % Layout::kChunks;
    const bool wanted = row < valid;
    copy_async(shared_address(to) + Layout::offset(row, chunk),
               from + (wanted ? begin(row) + chunk * 8 : 0), wanted);
  }
}

/// A warp's 32 keys, as operands in registers, and their counts. In block m, lane l counts key m *
/// 16 + l / 4 (half 0) and key m * 16 + l / 4 + 8 (half 1), each for queries l % 4 * 2 and l % 4 *
/// 2 + 1 of every eight queries.
template <class T, int kDim, Count kCount>
class WarpKeys {
 public:
  using Layout = Swizzled<kDim * sizeof(T)>;

  __device__ explicit WarpKeys(const T* keys) {
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int d = 0; d < kDim / 16; ++d)
        load_matrices(keys_[m][d], shared_address(keys) +
                                       Layout::offset(m * 16 + lane() % 16, d * 2 + lane() / 16));
  }

  /// Adds a tile of queries of one head. The key of (m, half) is visible to queries from visible(m,
  /// half) on.
  template <bool kMasked, class Visible>
  __device__ void add(const T* queries, const RowTerm* terms, float base2_scale, Visible visible) {
#pragma unroll
    for (int eight = 0; eight < kQueries / 8; eight += kEights) {
      float product[2][kEights][4] = {};
      multiply(queries, eight, product);
#pragma unroll
      for (int n = 0; n < kEights; ++n) {
        const int query = (eight + n) * 8 + lane() % 4 * 2;
        const auto both = *reinterpret_cast<const float4*>(terms + query);
        const RowTerm term[2] = {{both.x, both.y}, {both.z, both.w}};
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float p = exp2_fast(fmaf(product[m][n][i], base2_scale, term[i % 2].minus_lse2));
            if constexpr (kMasked)
              if (query + i % 2 < visible(m, i / 2)) p = kUnseen<kCount>;
            count_[m][i / 2].add(p, term[i % 2], (eight + n) * 2 + i % 2);
          }
      }
    }
    ++tiles_;
  }

  __device__ void end_queries(int first_query, const RowTerm* terms) {
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        count_[m][half].end_queries(first_query, terms, query_of_bit);
  }

  /// Calls write(key, count) once for each key, in one lane.
  template <class Write>
  __device__ void finish(Write write) {
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        count_[m][half].reduce(tiles_ * (kQueries / 4), 3);
        if (lane() % 4 == 0) write(m * 16 + half * 8 + lane() / 4, count_[m][half]);
      }
  }

 private:
  __device__ static int lane() { return threadIdx.x % 32; }

  /// Number of groups of eight queries whose products are in registers at the same time.
  static constexpr int kEights = 4;

  __device__ void multiply(const T* queries, int eight, float (&product)[2][kEights][4]) const {
    const std::uint32_t q = shared_address(queries);
    const int query = eight * 8 + lane() / 16 * 8 + lane() % 8;
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d)
#pragma unroll
      for (int n = 0; n < kEights; n += 2) {
        std::uint32_t b[4];
        load_matrices(b, q + Layout::offset(n * 8 + query, d * 2 + lane() / 8 % 2));
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          multiply_add<T>(product[m][n], keys_[m][d], b[0], b[1]);
          multiply_add<T>(product[m][n + 1], keys_[m][d], b[2], b[3]);
        }
      }
  }

  std::uint32_t keys_[2][kDim / 16][4];
  KeyCount<kCount> count_[2][2];
  std::uint32_t tiles_ = 0;
};

/// The tensor-core kernel.
template <class T, int kDim, Count kCount>
__global__ void __launch_bounds__(kThreads, 2) observe_tiles(const __grid_constant__ Plan plan) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<T, kDim>*>(memory);
  const auto& args = plan.args;
  const Part part(plan, kKeys);
  if (part.begin >= part.end) return;

  load_rows<T, kDim, kKeys>(
      shared.keys, static_cast<const T*>(args.prefill.keys),
      [&](int key) { return part.key_row(args, key); }, part.keys);
  commit_copies();
  wait_copies<0>();
  __syncthreads();
  const int warp_key = threadIdx.x / 32 * kKeysOfWarp;
  WarpKeys<T, kDim, kCount> warp(shared.keys + warp_key * kDim);
  __syncthreads();  // the keys are in registers now, so their memory is free

  const std::int64_t stride = std::int64_t{args.prefill.query_heads} * kDim;
  const int tiles = (part.end - part.begin + kQueries - 1) / kQueries * plan.group;
  const auto query_of = [&](int tile) { return part.begin + tile / plan.group * kQueries; };
  const auto fetch = [&](int tile) {
    const int query = query_of(tile), head = part.kv_head * plan.group + tile % plan.group;
    load_rows<T, kDim, kQueries>(
        shared.queries[tile % kStages],
        static_cast<const T*>(args.prefill.q) + (part.own.begin + query) * stride + head * kDim,
        [&](int row) { return row * stride; }, part.own.count - query);
    constexpr int kTermsAtOnce = 16 / sizeof(RowTerm);
    if (threadIdx.x < kQueries / kTermsAtOnce)
      copy_async(shared_address(shared.terms[tile % kStages]) + threadIdx.x * 16,
                 part.terms(plan, head, query) + threadIdx.x * kTermsAtOnce, true);
  };
  fetch(0);
  commit_copies();
  for (int tile = 0; tile < tiles; ++tile) {
    wait_copies<0>();
    __syncthreads();  // this tile has arrived, and the previous tile has been read
    if (tile + 1 < tiles) fetch(tile + 1);
    commit_copies();
    const int query = query_of(tile);
    const auto visible = [&](int m, int half) {
      const int key = part.first_key + warp_key + m * 16 + half * 8 + threadIdx.x % 32 / 4;
      return key - part.first - query;
    };
    const T* queries = shared.queries[tile % kStages];
    const RowTerm* terms = shared.terms[tile % kStages];
    if (part.first_key + warp_key + kKeysOfWarp - 1 <= part.first + query)
      warp.template add<false>(queries, terms, plan.base2_scale, visible);
    else
      warp.template add<true>(queries, terms, plan.base2_scale, visible);
    if (tile % plan.group == plan.group - 1) warp.end_queries(query, terms);
  }

  kvlab_observation* const seen = args.seen + part.key_index(args) + warp_key;
  warp.finish([&](int key, const KeyCount<kCount>& count) {
    if (warp_key + key < part.keys) count.add_to(seen[key], part.position(args));
  });
}

constexpr int kPlainKeys = 32;

/// The float32 kernel. A lane handles one key, and a warp handles every fourth query. Products
/// equal those of prefill_plain bit for bit.
template <int kDim, Count kCount>
__global__ void __launch_bounds__(kThreads) observe_plain(const __grid_constant__ Plan plan) {
  __shared__ float keys[kPlainKeys][kDim + 1];  // padded, so that the same column of 32 keys is in
                                                // 32 banks
  const auto& args = plan.args;
  const Part part(plan, kPlainKeys);
  if (part.begin >= part.end) return;
  const float* all_keys = static_cast<const float*>(args.prefill.keys);
  for (int i = threadIdx.x; i < part.keys * kDim; i += kThreads)
    keys[i / kDim][i % kDim] = all_keys[part.key_row(args, i / kDim) + i % kDim];
  __syncthreads();

  const int lane = threadIdx.x % 32;
  KeyCount<kCount> count;
  std::uint32_t added = 0;
  for (int query = part.begin + threadIdx.x / 32; query < part.end; query += kWarps) {
    const bool sees = lane < part.keys && part.first_key + lane <= part.first + query;
    for (int h = 0; h < plan.group; ++h, ++added) {
      const int head = part.kv_head * plan.group + h;
      const float* q =
          static_cast<const float*>(args.prefill.q) +
          (std::int64_t{part.own.begin + query} * args.prefill.query_heads + head) * kDim;
      const RowTerm term = *part.terms(plan, head, query);
      float product = 0;
      if (sees)
        for (int d = 0; d < kDim; ++d) product = fmaf(q[d], keys[lane][d], product);
      const float p = exp2_fast(fmaf(product, plan.base2_scale, term.minus_lse2));
      count.add(sees ? p : kUnseen<kCount>, term, 0);
    }
    count.end_queries(query, part.terms(plan, part.kv_head * plan.group, query),
                      [](int) { return 0; });
  }
  count.reduce(added, 0);
  if (lane < part.keys) count.add_to(args.seen[part.key_index(args) + lane], part.position(args));
}

template <class T, int kDim, Count kCount>
cudaError_t launch_tiles(const Plan& plan, cudaStream_t stream) {
  constexpr std::size_t kBytes = sizeof(Shared<T, kDim>);
  DeviceLimits limits;
  if (const cudaError_t error = device_limits(limits)) return error;
  if (kBytes > static_cast<std::size_t>(limits.shared_bytes))
    return cudaErrorNotSupported;  // why_not_prefill() returns the reason
  const cudaError_t allowed = cudaFuncSetAttribute(
      observe_tiles<T, kDim, kCount>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (allowed != cudaSuccess) return allowed;
  observe_tiles<T, kDim, kCount><<<grid(plan, kKeys), kThreads, kBytes, stream>>>(plan);
  return cudaGetLastError();
}

template <int kDim, Count kCount>
cudaError_t launch(const Plan& plan, cudaStream_t stream) {
  switch (plan.args.prefill.type) {
    case KVLAB_BF16:
      return launch_tiles<__nv_bfloat16, kDim, kCount>(plan, stream);
    case KVLAB_F16:
      return launch_tiles<__half, kDim, kCount>(plan, stream);
    case KVLAB_F32:
      break;
  }
  observe_plain<kDim, kCount><<<grid(plan, kPlainKeys), kThreads, 0, stream>>>(plan);
  return cudaGetLastError();
}

/// Whether the device has compute capability 9.0 and the driver loaded the code for sm_90a.
cudaError_t is_hopper(bool& hopper) {
  int device = 0, major = 0, minor = 0;
  cudaError_t error = cudaGetDevice(&device);
  const auto ask = [&](int& value, cudaDeviceAttr attribute) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, attribute, device);
  };
  ask(major, cudaDevAttrComputeCapabilityMajor);
  ask(minor, cudaDevAttrComputeCapabilityMinor);
  hopper = error == cudaSuccess && major == 9 && minor == 0 && has_hopper_code();
  return error;
}

template <Count kCount>
cudaError_t launch(const Plan& plan, cudaStream_t stream) {
  const std::int64_t rows =
      std::int64_t{round_up(plan.counted, kQueries)} * plan.args.prefill.query_heads;
  const dim3 grid(static_cast<unsigned>((rows + kThreads - 1) / kThreads),
                  static_cast<unsigned>(sequences_of(plan.args.prefill)));
  make_row_terms<<<grid, kThreads, 0, stream>>>(plan, kCount);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  bool hopper = false;
  if (const cudaError_t error = is_hopper(hopper); error != cudaSuccess) return error;
  if (hopper && plan.args.prefill.type != KVLAB_F32) return observe_on_hopper(plan, kCount, stream);
  switch (plan.args.prefill.head_size) {
    case 64:
      return launch<64, kCount>(plan, stream);
    case 96:
      return launch<96, kCount>(plan, stream);
    case 128:
      return launch<128, kCount>(plan, stream);
    default:
      return launch<256, kCount>(plan, stream);
  }
}

bool is_supported(const kvlab_observe_args& args) {
  const kvlab_prefill_args& prefill = args.prefill;
  if (!can_prefill(prefill) || args.younger < 0 || args.keys_end < 1) return false;
  const auto is_aligned = [](const void* pointer) {
    return pointer != nullptr && aligned16(pointer);
  };
  if (!is_aligned(prefill.q) || !is_aligned(prefill.keys) || !is_aligned(args.workspace))
    return false;
  if (!prefill.first_slot || !prefill.rows || !args.seen) return false;
  const auto needs = static_cast<Needs>(args.needs);
  return (needs_mass(needs) || needs_requests(needs)) &&
         (!needs_requests(needs) || args.threshold16 != nullptr);
}

/// Number of terms per head. The terms of each sequence are padded to whole tiles.
int padded_queries(const kvlab_prefill_args& args) {
  return args.sequences == 0 ? round_up(args.queries, kQueries)
                             : (args.all_queries / kQueries + args.sequences) * kQueries;
}

}  // namespace
}  // namespace observe

LaunchPlan observe_plan(Type type, int head_size, const DeviceLimits& limits) {
  using namespace observe;
  if (type == KVLAB_F32) return {.blocks = 1};
  const std::size_t bytes = head_size == 64    ? sizeof(Shared<__half, 64>)
                            : head_size == 96  ? sizeof(Shared<__half, 96>)
                            : head_size == 128 ? sizeof(Shared<__half, 128>)
                                               : sizeof(Shared<__half, 256>);
  return {.blocks = bytes <= static_cast<std::size_t>(limits.shared_bytes) ? 1 : 0,
          .stages = kStages,
          .shared_bytes = bytes};
}

std::size_t observe_workspace(const kvlab_prefill_args& args) {
  using namespace observe;
  return std::size_t(args.query_heads) * padded_queries(args) * sizeof(RowTerm);
}

cudaError_t observe_queries(const kvlab_observe_args& args, cudaStream_t stream) {
  using namespace observe;
  if (!is_supported(args)) return cudaErrorInvalidValue;
  const kvlab_prefill_args& prefill = args.prefill;
  const auto needs = static_cast<Needs>(args.needs);
  const std::uint32_t tail = args.tail == 0 ? kNoTail : args.tail;
  Plan plan{.args = args,
            .tail = kNoTail,
            .group = prefill.query_heads / prefill.kv_heads,
            .counted = prefill.queries,
            .padded = padded_queries(prefill),
            .base2_scale = prefill.softmax_scale * kLog2E,
            .terms = static_cast<RowTerm*>(args.workspace)};
  if (needs_requests(needs)) {
    const cudaError_t error = launch<Count::requests>(plan, stream);
    if (error != cudaSuccess || !needs_mass(needs)) return error;
  }
  plan.tail = tail;
  // Only the last `tail` queries of the prompt have a weight above 0. Because queries are processed
  // in whole tiles, the first tile may also contain up to kQueries - 1 older queries.
  const std::int64_t weighing = std::int64_t{tail} - (args.youngers ? 0 : args.younger);
  if (weighing <= 0) return cudaSuccess;
  plan.counted = static_cast<int>(std::min<std::int64_t>(prefill.queries, weighing + kQueries - 1));
  if (args.group_max) return launch<Count::largest>(plan, stream);
  return args.weights == nullptr ? launch<Count::mass>(plan, stream)
                                 : launch<Count::weighted>(plan, stream);
}

}  // namespace kvlab::kernels
