// Replays caches that evict the oldest token first. Then the tokens that a query attends to are
// known without a walk. Before an append that begins at position f, a cache with budget B and S
// sinks keeps all tokens if f <= B - 1; otherwise it keeps its sinks and the last B - 1 - S tokens.
// The sums of a row over chunks of tokens are computed once, and all configurations use them.
//
// With cache positions, the exponentials of the window's tokens are those of the row, because no
// younger token was evicted. The exponentials of the sinks are direct.
#include <cstddef>

#include "kernels/device/load.cuh"
#include "kernels/replay/direct.cuh"

namespace kvlab::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kChunks = 64;                   // maximum number of chunks per row
constexpr int kRanges = kChunks / kWarpSize;  // chunks that a lane sums

/// Three sums over tokens: the sum of exponentials, the sum of exponentials of vectors that were
/// not rounded, and the number of tokens that the query requests, without the query's own token.
template <int kHeadGroups>
struct RowSums {
  float4 full[kHeadGroups], cache_positions[kHeadGroups];
  uint4 hits[kHeadGroups];
};
/// Sums by chunk. At first, the entry of a chunk holds the sums of this chunk alone. Later, it
/// holds the sums over this chunk and all later chunks.
template <int kHeadGroups>
using ChunkSums = RowSums<kHeadGroups>[kChunks + 1];

/// The tokens that a query attends to: [0, sinks) and [first, query].
struct Window {
  std::uint32_t sinks, first;
  __device__ bool is_whole() const { return first == 0; }
  __device__ std::uint32_t live(std::uint32_t query) const { return sinks + query + 1 - first; }
};

/// The first position of the append that contains a query.
__device__ std::uint32_t append_of(const ReplayAppend* appends, std::uint32_t count,
                                   std::uint32_t tokens, std::uint32_t query) {
  const std::uint32_t remaining = tokens - query;  // most queries are appended alone, by decoding
  if (remaining <= count && appends[count - remaining].first == query) return query;
  std::uint32_t low = 0, high = count;
  while (high - low > 1) {
    const std::uint32_t middle = (low + high) / 2;
    (appends[middle].first <= query ? low : high) = middle;
  }
  return appends[low].first;
}

/// A query of one head task.
template <int kHeadGroups>
class WindowQuery {
  using Sums = RowSums<kHeadGroups>;
  static constexpr int kHeads = 4 * kHeadGroups;

 public:
  __device__ WindowQuery(const ReplayWindowsArgs& args, ChunkSums<kHeadGroups>& chunks)
      : args_(args),
        chunks_(chunks),
        i_(static_cast<int>(blockIdx.x)),
        first_member_(
            args.sweep.config_tasks ? static_cast<int>(blockIdx.y) / args.sweep.config_tasks : 0),
        task_(args.sweep.config_tasks
                  ? args.sweep.task_of(args.members[first_member_],
                                       static_cast<int>(blockIdx.y) % args.sweep.config_tasks)
                  : static_cast<int>(blockIdx.y)),
        query_(static_cast<std::uint32_t>(args.rows.first + i_)),
        index_(args.measured.index[query_]),
        row_(args.rows.row(task_, i_)),
        lane_(threadIdx.x % kWarpSize),
        warp_(threadIdx.x / kWarpSize),
        chunk_((query_ + kChunks) / kChunks + kWarpSize - 1) {
    chunk_ = chunk_ / kWarpSize * kWarpSize;
    for (int head_group = 0; head_group < kHeadGroups; ++head_group) {
      const std::int64_t at = row_ * kHeadGroups + head_group;
      full_[head_group] = args.rows.e + at * args.shape.tokens;
      cache_positions_[head_group] =
          args.cache_positions.e ? args.cache_positions.e + at * args.shape.tokens : nullptr;
      min_requested_[head_group] = args.rows.request_threshold[at];
    }
  }

  __device__ void take_members() {
    const bool measures = index_ >= 0;
    if (!measures && !args_.kept_bits) return;
    if (measures) sum_chunks();
    const int end = args_.sweep.config_tasks ? first_member_ + 1 : args_.member_count;
    for (int m = first_member_ + static_cast<int>(warp_); m < end; m += kWarps) {
      const std::int64_t cache = args_.sweep.cache_of(task_, args_.members[m]);
      const ReplayRule& rule = args_.sweep.rules[cache];
      const Window window = window_of(rule);
      if (args_.kept_bits)
        mark(args_.kept_bits + (cache * args_.shape.tokens + query_) * args_.shape.words(), window,
             0);
      if (measures) measure(cache, rule, window);
    }
  }

 private:
  __device__ Window window_of(const ReplayRule& rule) const {
    const std::uint32_t tokens = rule.appends[rule.num_appends].first;
    const std::uint32_t first = append_of(rule.appends, rule.num_appends, tokens, query_);
    const std::uint32_t budget = rule.rule.budget, sinks = rule.rule.sinks;
    if (budget == kUnlimited || first <= budget - 1) return {0, 0};
    return {sinks, first - (budget - 1 - sinks)};
  }

  // Sums of the row.

  /// This lane's part of the sums over the tokens [begin, end). All lanes together cover the range.
  __device__ Sums sum(std::uint32_t begin, std::uint32_t end) const {
    Sums sums{};
    for (std::uint32_t token = begin + lane_; token < end; token += kWarpSize)
#pragma unroll
      for (int head_group = 0; head_group < kHeadGroups; ++head_group) {
        const float4 x = full_[head_group][token], bound = min_requested_[head_group];
        add(sums.full[head_group], x);
        if (cache_positions_[head_group])
          add(sums.cache_positions[head_group], cache_positions_[head_group][token]);
        if (token < query_) count_from(sums.hits[head_group], x, bound);
      }
    return sums;
  }
  /// Adds up the sums of all lanes. Every lane gets the result.
  __device__ static Sums fold_lanes(const Sums& sums) {
    Sums all;
#pragma unroll
    for (int head_group = 0; head_group < kHeadGroups; ++head_group) {
      all.full[head_group] = gather_lanes(warp_fold4(sums.full[head_group], Add{}), 0);
      all.cache_positions[head_group] =
          gather_lanes(warp_fold4(sums.cache_positions[head_group], Add{}), 0);
      all.hits[head_group] = warp_sum4(sums.hits[head_group]);
    }
    return all;
  }
  __device__ static void add_to(Sums& sums, const Sums& other) {
#pragma unroll
    for (int head_group = 0; head_group < kHeadGroups; ++head_group) {
      add(sums.full[head_group], other.full[head_group]);
      add(sums.cache_positions[head_group], other.cache_positions[head_group]);
      sums.hits[head_group].x += other.hits[head_group].x,
          sums.hits[head_group].y += other.hits[head_group].y;
      sums.hits[head_group].z += other.hits[head_group].z,
          sums.hits[head_group].w += other.hits[head_group].w;
    }
  }

  /// Computes the sums of each chunk, and then, for each chunk, the sums from that chunk to the
  /// last one.
  __device__ void sum_chunks() {
    for (std::uint32_t c = warp_; c <= kChunks; c += kWarps) {
      const std::uint32_t begin = c * chunk_;
      Sums sums{};
      if (begin <= query_) sums = fold_lanes(sum(begin, min(begin + chunk_, query_ + 1)));
      if (lane_ == 0) chunks_[c] = sums;
    }
    __syncthreads();
    constexpr std::uint32_t kWords = sizeof(Sums) / 4;
    for (std::uint32_t word = warp_; word < kWords; word += kWarps)
      if (word < offsetof(Sums, hits) / 4)  // the members before `hits` are floats
        sum_from<float>(word);
      else
        sum_from<std::uint32_t>(word);
    __syncthreads();
  }
  /// Replaces one 32-bit word of each chunk's sums by the sum of this word over that chunk and all
  /// later ones. A lane handles kRanges consecutive chunks.
  template <class T>
  __device__ void sum_from(std::uint32_t word) {
    const auto at = [&](std::uint32_t c) -> T& { return reinterpret_cast<T*>(&chunks_[c])[word]; };
    T own = 0;
    for (std::uint32_t c = (lane_ + 1) * kRanges; c-- > lane_ * kRanges;) own += at(c);
    T later = own;
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const T other = __shfl_down_sync(~0u, later, distance);
      if (lane_ + distance < kWarpSize) later += other;
    }
    later = __shfl_down_sync(~0u, later, 1);
    if (lane_ == kWarpSize - 1) later = 0;
    for (std::uint32_t c = (lane_ + 1) * kRanges; c-- > lane_ * kRanges;) later = at(c) += later;
  }

  // Functions that one warp calls for each configuration.

  __device__ void measure(std::int64_t cache, const ReplayRule& rule, const Window& window) {
    const std::uint32_t chunk = window.first / chunk_;
    Sums young = fold_lanes(sum(window.first, min((chunk + 1) * chunk_, query_ + 1)));
    add_to(young, chunks_[chunk + 1]);
    const Sums sinks = fold_lanes(sum(0, window.sinks));
    const bool cache_positions = rule.cache_positions && !window.is_whole();
    Sums kept = young;
    add_to(kept, sinks);
    if (args_.counts.kept && lane_ < static_cast<unsigned>(args_.shape.group)) {
      const uint4& hits = kept.hits[lane_ / 4];
      const std::uint32_t found[4] = {hits.x, hits.y, hits.z, hits.w};
      const std::int64_t at = (cache * args_.rows.block + i_) * kHeads + lane_;
      args_.counts.kept[at] = head_of(kept.full);
      args_.counts.hits[at] = found[lane_ % 4];
      if (lane_ == 0) args_.counts.live[cache * args_.rows.block + i_] = window.live(query_);
    }
    if (index_ % args_.sets.every != 0) return;

    // Lane l holds the sum of head l.
    float total = head_of(cache_positions        ? young.cache_positions
                          : rule.cache_positions ? kept.cache_positions
                                                 : kept.full);
    const Direct direct = direct_of(cache);
    if (cache_positions)
      total += take_tokens(
          window, window.sinks, true,
          reinterpret_cast<const float*>(args_.cache_positions.max_logits + row_ * kHeadGroups),
          direct);
    const bool lost = is_lost(total, args_.shape);
    if (lost) total = take_tokens(window, window.live(query_), cache_positions, nullptr, direct);
    store_kept(args_.sets.kept_of(cache, index_), window, total,
               window.is_whole() && !rule.cache_positions, cache_positions, lost);
  }
  __device__ float head_of(const float4 (&sums)[kHeadGroups]) const {
    return component(sums[kHeadGroups == 1 ? 0 : lane_ / 4 % kHeadGroups],
                     static_cast<int>(lane_ % 4));
  }

  // Outputs.

  /// Where the sums of direct exponentials are stored: those multiplied by values (for a sampled
  /// query), and those multiplied by terms.
  struct Direct {
    float *values, *changes;
  };
  __device__ Direct direct_of(std::int64_t cache) const {
    const ReplayKeptSets& sets = args_.sets;
    const std::int64_t group = args_.shape.group;
    return {args_.measured.samples(index_)
                ? sets.values +
                      sets.sample_of(args_.measured, cache, index_) * group * args_.shape.head_size
                : nullptr,
            args_.terms.gradient_samples
                ? sets.changes + sets.kept_of(cache, index_) * args_.terms.gradient_samples * group
                : nullptr};
  }
  /// The n-th of the tokens that the query attends to.
  __device__ AttendedToken attended_token(const Window& window, std::uint32_t n,
                                          bool cache_positions) const {
    const std::uint32_t position = n < window.sinks ? n : window.first + (n - window.sinks),
                        position_in_cache = query_ + 1 - window.live(query_) + n;
    return {task_, query_, position, position_in_cache, cache_positions};
  }
  __device__ float logit(const AttendedToken& token, int head) const {
    return direct_product(args_.shape, args_.tensors, token, head) * args_.shape.softmax_scale;
  }

  /// Computes the exponentials of the first `count` attended tokens. Returns in lane l their sum
  /// for head l. `max_logit`: for each head, the logit that is subtracted in the exponents. Null:
  /// the largest logit of these tokens.
  __device__ __noinline__ float take_tokens(const Window& window, std::uint32_t count,
                                            bool cache_positions, const float* max_logit,
                                            const Direct& direct) const {
    float sum = 0;
    for (int head = 0; head < args_.shape.group; ++head) {
      float largest = max_logit ? max_logit[head] : -3.4e38f;
      for (std::uint32_t n = 0; !max_logit && n < count; ++n)
        largest = fmaxf(largest, logit(attended_token(window, n, cache_positions), head));
      const float head_sum = take_values(window, count, cache_positions, head, largest, direct);
      if (lane_ == static_cast<unsigned>(head)) sum = head_sum;
    }
    return sum;
  }
  /// Computes one head's exponentials of the first `count` attended tokens. Writes the sums of
  /// exponentials times values, and times terms, to `direct`. Returns the sum of the exponentials.
  __device__ float take_values(const Window& window, std::uint32_t count, bool cache_positions,
                               int head, float max_logit, const Direct& direct) const {
    const ReplayShape& shape = args_.shape;
    constexpr int kParts = kMaxReplayHeadSize / kReplayDims;
    constexpr int kGradientSamples = kMaxReplayGradientSamples / kWarpSize;
    const int gradient_samples = direct.changes ? args_.terms.gradient_samples : 0,
              lane = static_cast<int>(lane_);
    const QueryTerms terms(shape, args_.terms, task_, index_);
    float sum = 0, changes[kGradientSamples] = {};
    float4 values[kParts] = {};
    for (std::uint32_t n = 0; n < count; ++n) {
      const AttendedToken token = attended_token(window, n, cache_positions);
      const float e = expf(logit(token, head) - max_logit);
      sum += e;
#pragma unroll
      for (int n = 0; n < kGradientSamples; ++n)
        if (n * kWarpSize + lane < gradient_samples)
          changes[n] = fmaf(
              e, terms.at(token.position, (n * kWarpSize + lane) * shape.group + head), changes[n]);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int d = part * kReplayDims + 4 * lane;
        if (direct.values && d < shape.head_size)
          add_product(
              values[part], e,
              load4(args_.tensors.values, shape.type, shape.vector(task_, token.position) + d));
      }
    }
#pragma unroll
    for (int n = 0; n < kGradientSamples; ++n)
      if (n * kWarpSize + lane < gradient_samples)
        direct.changes[(n * kWarpSize + lane) * shape.group + head] = changes[n];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int d = part * kReplayDims + 4 * lane;
      if (direct.values && d < shape.head_size)
        *reinterpret_cast<float4*>(direct.values + head * shape.head_size + d) = values[part];
    }
    return sum;
  }

  /// Sets the bits of the attended tokens whose positions are at least `first`, in words [0, query
  /// / 32].
  __device__ void mark(std::uint32_t* words, const Window& window, std::uint32_t first) const {
    const auto below = [](std::uint32_t n) { return n < 32 ? (1u << n) - 1 : ~0u; };
    for (std::uint32_t w = lane_; w * 32 <= query_; w += kWarpSize) {
      const auto before = [&](std::uint32_t end) { return below(end - min(end, w * 32)); };
      const std::uint32_t attended = before(window.sinks) | ~before(window.first);
      words[w] = attended & before(query_ + 1) & ~before(first);
    }
  }
  __device__ void store_kept(std::int64_t kept, const Window& window, float total, bool whole,
                             bool cache_positions, bool lost) const {
    mark(args_.sets.shared + kept * args_.shape.words(), window,
         lost              ? query_ + 1
         : cache_positions ? window.first
                           : 0);
    ReplayKept& to = args_.sets.kept[kept];
    if (lane_ < kHeads) to.sums[lane_] = total;
    if (lane_ == 0) to.whole = whole, to.direct = cache_positions || lost;
  }

  const ReplayWindowsArgs& args_;
  ChunkSums<kHeadGroups>& chunks_;
  const int i_, first_member_, task_;
  const std::uint32_t query_;
  const int index_;
  const std::int64_t row_;
  const std::uint32_t lane_, warp_;
  std::uint32_t chunk_;  ///< tokens per chunk
  const float4 *full_[kHeadGroups], *cache_positions_[kHeadGroups];
  float4 min_requested_[kHeadGroups];
};

/// Uses one thread block for each query (x) and head task (y) or, if configurations have separate
/// head tasks, for each head task of a member (y).
template <int kHeadGroups>
__global__ void __launch_bounds__(kThreads)
    windows_kernel(const __grid_constant__ ReplayWindowsArgs args) {
  __shared__ ChunkSums<kHeadGroups> chunks;
  WindowQuery<kHeadGroups>(args, chunks).take_members();
}

}  // namespace

cudaError_t replay_windows(const ReplayWindowsArgs& args, cudaStream_t stream) {
  if (!args.shape.is_launchable() || !args.rows.is_launchable() || args.member_count < 1)
    return cudaErrorInvalidValue;
  const int tasks = args.sweep.config_tasks;
  const dim3 queries =
      grid_of(args.rows.count, tasks ? args.member_count * tasks : args.shape.tasks);
  if (args.shape.head_groups() == 1)
    windows_kernel<1><<<queries, kThreads, 0, stream>>>(args);
  else
    windows_kernel<2><<<queries, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace kvlab::kernels
