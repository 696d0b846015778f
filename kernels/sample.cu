// Sampling on the device. It gives the same samples as engine/sampler.hpp on the host. The logits
// are not sorted. To find the id at some place in the order "most probable first, then lowest id",
// the kernel makes histograms of the logits' distances from the largest logit, over 11 bits of the
// distance per pass. Weights are integers, so sums are exact and do not depend on the order of
// threads.
//
// Memory traffic: greedy sampling reads the logits once, 4 * vocab bytes per row. Otherwise one
// multiprocessor reads a row 3 to 12 times, from the L2 cache.
#include <cmath>
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>
#include <cub/warp/warp_scan.cuh>

#include "kernels/device/grid_dependency.cuh"
#include "kernels/device/likeliest.cuh"
#include "kernels/device/reduce.cuh"
#include "kernels/launch.cuh"
#include "kernels/pointwise.hpp"

namespace kvlab::kernels {
namespace {

using u32 = std::uint32_t;
using u64 = unsigned long long;

constexpr int kParts = 32;  ///< number of parts in which a row is searched for its largest logit;
                            ///< each lane of a warp then takes one
constexpr int kPartThreads = 256;
constexpr int kThreads = 1024, kWarps = kThreads / kWarpSize;
constexpr int kLimbBits = 14,
              kLimbs =
                  3;  ///< A weight has kLimbs limbs, so that 32-bit sums of limbs do not overflow.
// The largest float below 2^42, so that weights fit the limbs
constexpr float kMaxWeight = 0x1.fffffep41f;
constexpr int kMaxVocab = 1 << (32 - kLimbBits);
constexpr int kBucketBits = 11, kBuckets = 1 << kBucketBits;

/// workspace[row, part] = the best candidate of that part of the row.
__global__ void __launch_bounds__(kPartThreads) best_of_parts(const SampleArgs args) {
  using Reduce = cub::BlockReduce<u64, kPartThreads>;
  __shared__ Reduce::TempStorage storage;
  let_successor_start();
  wait_for_predecessor();
  const float* const logits = args.logits + std::size_t{blockIdx.y} * args.vocab;
  u64 best = 0;
  for (int id = static_cast<int>(blockIdx.x * kPartThreads + threadIdx.x); id < args.vocab;
       id += kParts * kPartThreads)
    best = max(best, candidate(logits[id], id));
  best = Reduce(storage).Reduce(best, cuda::maximum<>{});
  if (threadIdx.x == 0) static_cast<u64*>(args.workspace)[blockIdx.y * kParts + blockIdx.x] = best;
}

/// SplitMix64's finalizer applied to the counter-th state after `seed`; 53 bits.
__device__ inline u64 uniform_at(u64 seed, u64 counter) {
  u64 x = seed + (counter + 1) * 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return (x ^ (x >> 31)) >> 11;
}

/// floor(total * bits / 2^53).
__device__ inline u64 scale_weight(u64 total, u64 bits) {
  return __umul64hi(total, bits) << 11 | total * bits >> 53;
}

/// Unnormalized probabilities at a temperature: kMaxWeight for the largest probability, 0 for
/// probabilities below about 1e-13 of the largest.
struct Weights {
  float largest, temperature;
  __device__ u64 operator()(float logit) const {
    return __float2ull_rn(fminf(expf((logit - largest) / temperature) * 0x1p42f, kMaxWeight));
  }
};

struct Sum {
  u32 count = 0;
  u64 weight = 0;
};
__device__ inline Sum operator+(Sum a, Sum b) { return {a.count + b.count, a.weight + b.weight}; }

enum class Measure { count, weight };
__device__ inline u64 in(Measure measure, Sum sum) {
  return measure == Measure::count ? sum.count : sum.weight;
}

/// A place in the order: a distance from the largest logit, and the count and weight of all ids
/// with a smaller distance.
struct Cutoff {
  u32 distance;
  Sum before;
};

using Reduce = cub::BlockReduce<u64, kThreads>;
using Scan = cub::BlockScan<u64, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;
using SumScan = cub::BlockScan<Sum, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;
using WarpScan = cub::WarpScan<u64>;

struct Shared {
  u32 counts[kBuckets];
  u32 limbs[kLimbs][kBuckets];
  union {  // only one is used at a time, with a barrier in between
    Reduce::TempStorage reduce;
    Scan::TempStorage scan;
    SumScan::TempStorage sums;
    WarpScan::TempStorage warp_scan[kWarps];
  };
  Cutoff found;
  u64 total;
  int id;
};

/// One row, which one thread block processes.
class Row {
 public:
  __device__ Row(const float* logits, int vocab, u32 top_key, Weights weights, Shared& shared)
      : logits_(logits), vocab_(vocab), top_(top_key), weights_(weights), shared_(shared) {}

  __device__ u64 weight(u32 distance) const { return weights_(from_order_key(top_ - distance)); }
  __device__ u64 weight_of(int id) const { return weights_(logits_[id]); }
  __device__ u32 distance_of(int id) const { return top_ - order_key(logits_[id]); }

  /// The first key in the order at which the running sum of `measure` exceeds `target`. Ignores
  /// keys after `last`.
  __device__ Cutoff find(Measure measure, u64 target, u32 last) {
    Cutoff cutoff{.distance = 0, .before = {}};
    int shift = 32;
    while (shift > 0) {
      const int bits = min(kBucketBits, shift);
      fill(cutoff.distance, shift, bits, last);
      shift -= bits;
      cutoff = cross(measure, target, cutoff, shift);
    }
    return cutoff;
  }

  /// The first id at which the running sum of value(id), in the order of ids, exceeds `target`; -1
  /// if there is none.
  template <class Value>
  __device__ int find_id(u64 target, Value value) {
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int share = (vocab_ + kWarps - 1) / kWarps;
    const int begin = min(warp * share, vocab_), end = min(begin + share, vocab_);
    u64 own = 0, before;
    for (int id = begin + lane; id < end; id += kWarpSize) own += value(id);
    if (threadIdx.x == 0) shared_.id = -1;
    Scan(shared_.scan).ExclusiveSum(own, before);
    const u64 after = __shfl_sync(~0u, before + own, kWarpSize - 1);
    before = __shfl_sync(~0u, before, 0);
    __syncthreads();
    if (before <= target && target < after)
      for (int base = begin; base < end && before <= target; base += kWarpSize) {
        const u64 here = base + lane < end ? value(base + lane) : 0;
        u64 until, sum;
        WarpScan(shared_.warp_scan[warp]).InclusiveSum(here, until, sum);
        until += before;
        if (until - here <= target && target < until) shared_.id = base + lane;
        before += sum;
      }
    __syncthreads();
    return shared_.id;
  }

 private:
  /// Makes a histogram of the next `bits` bits of those keys whose bits from `shift` up equal
  /// `prefix`.
  __device__ void fill(u32 prefix, int shift, int bits, u32 last) {
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < kBuckets; i += kThreads) {
      shared_.counts[i] = 0;
      for (auto& limb : shared_.limbs) limb[i] = 0;
    }
    __syncthreads();
#pragma unroll 4
    for (int id = static_cast<int>(threadIdx.x); id < vocab_; id += kThreads) {
      const float logit = logits_[id];
      const u32 distance = top_ - order_key(logit);
      if (distance > last || (shift < 32 && distance >> shift != prefix >> shift)) continue;
      const u32 bucket = distance >> (shift - bits) & ((1u << bits) - 1);
      const u64 weight = weights_(logit);
      atomicAdd(&shared_.counts[bucket], 1u);
      for (int i = 0; i < kLimbs; ++i) {
        const u32 rest = static_cast<u32>(weight >> i * kLimbBits);
        const u32 limb = i + 1 < kLimbs ? rest & ((1u << kLimbBits) - 1) : rest;
        if (limb) atomicAdd(&shared_.limbs[i][bucket], limb);
      }
    }
    __syncthreads();
  }

  __device__ Sum bucket(int i) const {
    Sum sum{shared_.counts[i], 0};
    for (int limb = 0; limb < kLimbs; ++limb)
      sum.weight += u64{shared_.limbs[limb][i]} << limb * kLimbBits;
    return sum;
  }

  /// Finds the bucket in which the running sum exceeds the target. Each thread has two buckets.
  __device__ Cutoff cross(Measure measure, u64 target, const Cutoff& from, int shift) {
    static_assert(kBuckets == 2 * kThreads);
    const int first = 2 * static_cast<int>(threadIdx.x);
    const Sum own[2] = {bucket(first), bucket(first + 1)};
    if (threadIdx.x == 0) shared_.found = from;
    Sum before;
    SumScan(shared_.sums).ExclusiveScan(own[0] + own[1], before, from.before, cuda::std::plus<>{});
    __syncthreads();
    for (int i = 0; i < 2; ++i) {
      const Sum after = before + own[i];
      if (in(measure, before) <= target && target < in(measure, after))
        shared_.found = {from.distance | static_cast<u32>(first + i) << shift, before};
      before = after;
    }
    __syncthreads();
    return shared_.found;
  }

  const float* logits_;
  int vocab_;
  u32 top_;
  Weights weights_;
  Shared& shared_;
};

/// The ids that top-k and top-p keep: all that are more probable than key `last`, and some ids with
/// that key.
struct Kept {
  u32 last;
  u64 weight;
};

__device__ Kept keep_likeliest(Row& row, u32 count) {
  const Cutoff cutoff = row.find(Measure::count, count - 1, 0xffffffffu);
  const u32 ties = count - cutoff.before.count;
  return {cutoff.distance, cutoff.before.weight + ties * row.weight(cutoff.distance)};
}

/// Keeps the smallest number of most probable ids whose weights together reach the share.
__device__ Kept keep_share(Row& row, Kept all, double share) {
  const u64 enough =
      max(u64{1}, static_cast<u64>(ceil(fmin(share, 1.0) * static_cast<double>(all.weight))));
  const u64 target = min(enough, all.weight) - 1;
  const Cutoff cutoff = row.find(Measure::weight, target, all.last);
  const u64 each = row.weight(cutoff.distance);
  const u64 ties = (target - cutoff.before.weight) / each + 1;
  return {cutoff.distance, cutoff.before.weight + ties * each};
}

__device__ int sample_row(Row& row, int vocab, int top_k, double top_p, u64 bits, u64 all_weight) {
  const bool cut = top_k > 0 && top_k < vocab;
  if (!cut && !(top_p < 1))
    return row.find_id(scale_weight(all_weight, bits), [&](int id) { return row.weight_of(id); });
  Kept kept{0xffffffffu, all_weight};
  if (cut) kept = keep_likeliest(row, static_cast<u32>(top_k));
  if (top_p < 1) kept = keep_share(row, kept, top_p);
  const u64 target = scale_weight(kept.weight, bits);
  const Cutoff cutoff = row.find(Measure::weight, target, kept.last);
  const u64 nth = (target - cutoff.before.weight) / row.weight(cutoff.distance);
  return row.find_id(nth, [&](int id) { return u64{row.distance_of(id) == cutoff.distance}; });
}

/// The sum of all weights, returned in every thread.
__device__ u64 total_weight(const float* logits, int vocab, Weights weights, Shared& shared) {
  u64 own = 0;
#pragma unroll 4
  for (int id = static_cast<int>(threadIdx.x); id < vocab; id += kThreads)
    own += weights(logits[id]);
  own = Reduce(shared.reduce).Sum(own);
  if (threadIdx.x == 0) shared.total = own;
  __syncthreads();
  return shared.total;
}

/// Uses one thread block for each row.
__global__ void __launch_bounds__(kThreads) choose(const SampleArgs args) {
  __shared__ Shared shared;
  let_successor_start();
  wait_for_predecessor();
  const u32 at = blockIdx.x;
  const u64 best =
      warp_max(static_cast<const u64*>(args.workspace)[at * kParts + threadIdx.x % kParts]);
  const float largest = from_order_key(static_cast<u32>(best >> 32));
  const float temperature = args.temperature[at];
  const u64 counter = args.counter[at];
  __syncthreads();  // all threads have read the counter

  int id = static_cast<int>(~static_cast<u32>(best));
  if (!isfinite(largest)) {
    id = -1;
  } else if (temperature > 0) {
    const float* const logits = args.logits + std::size_t{at} * args.vocab;
    const Weights weights{largest, temperature};
    Row row(logits, args.vocab, static_cast<u32>(best >> 32), weights, shared);
    const int chosen = sample_row(
        row, args.vocab, args.top_k[at], static_cast<double>(args.top_p[at]),
        uniform_at(args.seed[at], counter), total_weight(logits, args.vocab, weights, shared));
    if (chosen >= 0) id = chosen;
  }
  if (threadIdx.x != 0) return;
  args.ids[at] = id;
  args.counter[at] = counter + 1;
}

}  // namespace

std::size_t sample_workspace(int rows, int vocab) {
  return rows > 0 && vocab > 0 ? static_cast<std::size_t>(rows) * kParts * sizeof(u64) : 0;
}

cudaError_t sample(const SampleArgs& args, cudaStream_t stream) {
  if (args.rows <= 0 || args.rows > 65535 || args.vocab <= 0 || args.vocab > kMaxVocab ||
      !args.logits || !args.temperature || !args.top_p || !args.top_k || !args.seed ||
      !args.counter || !args.ids || !args.workspace)
    return cudaErrorInvalidValue;
  DeviceLimits limits;
  cudaError_t error = device_limits(limits);
  if (error != cudaSuccess) return error;
  const unsigned rows = static_cast<unsigned>(args.rows);
  error = launch(limits, best_of_parts,
                 {.grid = dim3(kParts, rows), .block = dim3(kPartThreads), .stream = stream}, args);
  if (error != cudaSuccess) return error;
  return launch(limits, choose, {.grid = dim3(rows), .block = dim3(kThreads), .stream = stream},
                args);
}

}  // namespace kvlab::kernels
