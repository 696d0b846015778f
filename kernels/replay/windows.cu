// Caches that evict the oldest first: what a query attends is known without a walk. Before an
// admission from position f on, a cache of budget B with S sinks keeps all, or, where f > B - 1,
// its sinks and the last B - 1 - S tokens. A row's sums over chunks of tokens serve all
// configurations.
//
// With squeezed positions the window's exponentials are a shared row's, as it has lost no younger
// token; the sinks' are computed here.
#include "kernels/device/load.cuh"
#include "kernels/replay/figures.cuh"
#include "kernels/replay/observe.cuh"

namespace kvlab::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kChunks = 64;                   // of a row, at most
constexpr int kRanges = kChunks / kWarpSize;  // of chunks that a lane sums

/// Sums over tokens: exponentials, those of unrounded vectors, requested tokens before the query.
template <int kQuads>
struct RowSums {
  float4 full[kQuads], squeezed[kQuads];
  uint4 hits[kQuads];
};
template <int kQuads>
struct WindowShared {
  RowSums<kQuads> from[kChunks + 1];  ///< first of a chunk, then of it and all later ones
};

/// What a query attends: tokens [0, sinks) and [first, query].
struct Window {
  std::uint32_t sinks, first;
  __device__ bool is_whole() const { return first == 0; }
  __device__ std::uint32_t live(std::uint32_t query) const { return sinks + query + 1 - first; }
};

/// The first position of the admission that a query is in.
__device__ std::uint32_t admission_of(const ReplayAdmission* admissions, std::uint32_t count,
                                      std::uint32_t tokens, std::uint32_t query) {
  const std::uint32_t behind = tokens - query;  // decoded one by one, as most are
  if (behind <= count && admissions[count - behind].first == query) return query;
  std::uint32_t low = 0, high = count;
  while (high - low > 1) {
    const std::uint32_t middle = (low + high) / 2;
    (admissions[middle].first <= query ? low : high) = middle;
  }
  return admissions[low].first;
}

/// One query of one unit.
template <int kQuads>
class WindowQuery {
  using Sums = RowSums<kQuads>;
  static constexpr int kHeads = 4 * kQuads;

 public:
  __device__ WindowQuery(const ReplayArgs& args, WindowShared<kQuads>& shared)
      : args_(args),
        shared_(shared),
        i_(static_cast<int>(blockIdx.x)),
        first_member_(args.own_units ? static_cast<int>(blockIdx.y) / args.own_units : 0),
        unit_(args.own_units ? args.unit_of(args.members[first_member_],
                                            static_cast<int>(blockIdx.y) % args.own_units)
                             : static_cast<int>(blockIdx.y)),
        query_(static_cast<std::uint32_t>(args.rows.first + i_)),
        index_(args.span.index[query_]),
        row_(std::int64_t{unit_} * args.rows.block + i_),
        lane_(threadIdx.x % kWarpSize),
        warp_(threadIdx.x / kWarpSize),
        chunk_((query_ + kChunks) / kChunks + kWarpSize - 1) {
    chunk_ = chunk_ / kWarpSize * kWarpSize;
    for (int quad = 0; quad < kQuads; ++quad) {
      const std::int64_t at = row_ * kQuads + quad;
      full_[quad] = args.rows.e + at * args.shape.tokens;
      squeezed_[quad] = args.rows.squeezed ? args.rows.squeezed + at * args.shape.tokens : nullptr;
      least_[quad] = args.rows.least[at];
    }
  }

  __device__ void run() {
    const bool measures = index_ >= 0;
    if (!measures && !args_.figures.kept) return;
    if (measures) sum_chunks();
    const int end = args_.own_units ? first_member_ + 1 : args_.member_count;
    for (int m = first_member_ + static_cast<int>(warp_); m < end; m += kWarps) {
      const int config = args_.members[m];
      const ReplayRule& rule = args_.rule_of(unit_, config);
      const Window window = window_of(rule);
      if (args_.figures.kept) note_kept(config, window);
      if (measures) measure(m, config, rule, window);
    }
  }

 private:
  __device__ Window window_of(const ReplayRule& rule) const {
    const std::uint32_t tokens = args_.admissions[rule.admissions + rule.admission_count].first;
    const std::uint32_t first =
        admission_of(args_.admissions + rule.admissions, rule.admission_count, tokens, query_);
    const std::uint32_t budget = rule.rule.budget, sinks = rule.rule.sinks;
    if (budget == kUnlimited || first <= budget - 1) return {0, 0};
    return {sinks, first - (budget - 1 - sinks)};
  }

  // Sums of the row.

  /// Of [begin, end), a part of every lane. `own`: of squeezed rows too.
  __device__ Sums sum(std::uint32_t begin, std::uint32_t end) const {
    Sums sums{};
    for (std::uint32_t token = begin + lane_; token < end; token += kWarpSize)
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        const float4 x = full_[quad][token], bound = least_[quad];
        add(sums.full[quad], x);
        if (squeezed_[quad]) add(sums.squeezed[quad], squeezed_[quad][token]);
        if (token < query_) {
          uint4& hits = sums.hits[quad];
          hits.x += x.x >= bound.x ? 1 : 0, hits.y += x.y >= bound.y ? 1 : 0;
          hits.z += x.z >= bound.z ? 1 : 0, hits.w += x.w >= bound.w ? 1 : 0;
        }
      }
    return sums;
  }
  /// Over the warp: in every lane.
  __device__ static Sums folded(const Sums& sums) {
    Sums all;
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      all.full[quad] = of_lanes(warp_fold4(sums.full[quad], Add{}), 0);
      all.squeezed[quad] = of_lanes(warp_fold4(sums.squeezed[quad], Add{}), 0);
      const uint4& hits = sums.hits[quad];
      all.hits[quad] = {__reduce_add_sync(~0u, hits.x), __reduce_add_sync(~0u, hits.y),
                        __reduce_add_sync(~0u, hits.z), __reduce_add_sync(~0u, hits.w)};
    }
    return all;
  }
  __device__ static void add_to(Sums& sums, const Sums& other) {
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      add(sums.full[quad], other.full[quad]);
      add(sums.squeezed[quad], other.squeezed[quad]);
      sums.hits[quad].x += other.hits[quad].x, sums.hits[quad].y += other.hits[quad].y;
      sums.hits[quad].z += other.hits[quad].z, sums.hits[quad].w += other.hits[quad].w;
    }
  }

  /// Each chunk's sums, then from each chunk on to the last.
  __device__ void sum_chunks() {
    for (std::uint32_t c = warp_; c <= kChunks; c += kWarps) {
      const std::uint32_t begin = c * chunk_;
      Sums sums{};
      if (begin <= query_) sums = folded(sum(begin, min(begin + chunk_, query_ + 1)));
      if (lane_ == 0) shared_.from[c] = sums;
    }
    __syncthreads();
    constexpr std::uint32_t kWords = sizeof(Sums) / 4;
    for (std::uint32_t word = warp_; word < kWords; word += kWarps)
      if (word < 8 * kQuads)
        sum_from<float>(word);
      else
        sum_from<std::uint32_t>(word);
    __syncthreads();
  }
  /// One word of all chunks' sums: a lane has kRanges of them.
  template <class T>
  __device__ void sum_from(std::uint32_t word) {
    const auto at = [&](std::uint32_t c) -> T& {
      return reinterpret_cast<T*>(&shared_.from[c])[word];
    };
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

  // Figures, by a warp for each configuration.

  __device__ void measure(int member, int config, const ReplayRule& rule, const Window& window) {
    const std::uint32_t chunk = window.first / chunk_;
    Sums young = folded(sum(window.first, min((chunk + 1) * chunk_, query_ + 1)));
    add_to(young, shared_.from[chunk + 1]);
    const Sums sinks = folded(sum(0, window.sinks));
    const bool squeezed = rule.squeezed && !window.is_whole();
    Sums kept = young;
    add_to(kept, sinks);
    if (args_.figures.sums && lane_ < kHeads && lane_ < static_cast<unsigned>(args_.shape.group))
      note_figures(member, kept, window);
    if (index_ % args_.samples.kept_every != 0) return;

    float total = 0;  // of lane l for head l
    const std::int64_t figure = args_.figure_of(unit_, config),
                       kept_set = args_.kept_of(figure, index_);
    const Own own = own_of(figure);
    if (squeezed) total = head_of(young.squeezed) + take_sinks(window, own);
    if (!squeezed) total = head_of(rule.squeezed ? kept.squeezed : kept.full);
    const bool head = lane_ < static_cast<unsigned>(args_.shape.group);
    const bool lost = __any_sync(~0u, head && !(total >= kLostSum && total <= kVastSum));
    if (lost) total = take_own(window, squeezed, own);
    leave_kept(kept_set, window, total, window.is_whole() && !rule.squeezed, squeezed, lost);
  }
  __device__ float head_of(const float4 (&sums)[kQuads]) const {
    return component(sums[kQuads == 1 ? 0 : lane_ / 4 % kQuads], static_cast<int>(lane_ % 4));
  }

  /// Recall, its logarithm, misses and what was wanted, of head `lane`.
  __device__ void note_figures(int member, const Sums& kept, const Window& window) const {
    const auto of_head = [&](const auto* rows) {
      return reinterpret_cast<const float*>(rows + row_ * kQuads)[lane_];
    };
    const std::uint32_t wanted = __float_as_uint(of_head(args_.rows.wanted));
    const uint4& hits = kept.hits[lane_ / 4];
    const std::uint32_t found[4] = {hits.x, hits.y, hits.z, hits.w};
    const bool whole = window.is_whole();
    const float recall = whole ? 1.0f : head_of(kept.full) / of_head(args_.rows.sums),
                missed = whole ? 0.0f : static_cast<float>(wanted - found[lane_ % 4]);
    const std::int64_t at =
        (std::int64_t{unit_} * args_.member_count + member) * args_.rows.block + i_;
    args_.windows[at * kHeads + lane_] = {recall,
                                          static_cast<float>(-log(fmax(double{recall}, 1e-9))),
                                          missed, static_cast<float>(wanted)};
  }

  // Outputs.

  /// Where exponentials that the cache computes itself go: by values, of a sampled query, and by
  /// terms.
  struct Own {
    float *values, *changes;
  };
  __device__ Own own_of(std::int64_t figure) const {
    const ReplaySamples& samples = args_.samples;
    const std::int64_t group = args_.shape.group;
    const bool sampled = index_ % args_.span.sample_every == 0;
    return {sampled ? samples.own + args_.sample_of(figure, index_) * group * args_.shape.head_size
                    : nullptr,
            samples.draws
                ? samples.own_changes + args_.kept_of(figure, index_) * samples.draws * group
                : nullptr};
  }
  /// A token that is n-th of those attended.
  __device__ OwnToken attended(const Window& window, std::uint32_t n, bool squeezed) const {
    const std::uint32_t position = n < window.sinks ? n : window.first + (n - window.sinks),
                        place = query_ + 1 - window.live(query_) + n;
    return {unit_, query_, position, place, squeezed};
  }
  __device__ float logit(const OwnToken& token, int head) const {
    return own_product(args_, token, head) * args_.shape.softmax_scale;
  }

  /// The sinks' exponentials, with the maximum of the shared row, to `own`: their sum, of lane l
  /// for head l.
  __device__ float take_sinks(const Window& window, const Own& own) const {
    float sum = 0;
    for (int head = 0; head < args_.shape.group; ++head) {
      const float most = reinterpret_cast<const float*>(args_.rows.most + row_ * kQuads)[head];
      const float of_head = take_values(window, window.sinks, true, head, most, own);
      if (lane_ == static_cast<unsigned>(head)) sum = of_head;
    }
    return sum;
  }
  /// The exponentials of all that is attended, with its own maximum, to `own`: their sum.
  __device__ __noinline__ float take_own(const Window& window, bool squeezed,
                                         const Own& own) const {
    const std::uint32_t live = window.live(query_);
    float sum = 0;
    for (int head = 0; head < args_.shape.group; ++head) {
      float most = -3.4e38f;
      for (std::uint32_t n = 0; n < live; ++n)
        most = fmaxf(most, logit(attended(window, n, squeezed), head));
      const float of_head = take_values(window, live, squeezed, head, most, own);
      if (lane_ == static_cast<unsigned>(head)) sum = of_head;
    }
    return sum;
  }
  /// A head's exponentials of the first `count` tokens attended, to `own`: their sum.
  __device__ float take_values(const Window& window, std::uint32_t count, bool squeezed, int head,
                               float most, const Own& own) const {
    const ReplayShape& shape = args_.shape;
    constexpr int kParts = kMostReplayHeadSize / kReplayDims;
    constexpr int kDraws = kMostReplayDraws / kWarpSize;
    const int draws = own.changes ? args_.samples.draws : 0, lane = static_cast<int>(lane_);
    const QueryTerms terms(args_, unit_, index_);
    float sum = 0, changes[kDraws] = {};
    float4 values[kParts] = {};
    for (std::uint32_t n = 0; n < count; ++n) {
      const OwnToken token = attended(window, n, squeezed);
      const float e = expf(logit(token, head) - most);
      sum += e;
#pragma unroll
      for (int n = 0; n < kDraws; ++n)
        if (n * kWarpSize + lane < draws)
          changes[n] = fmaf(
              e, terms.at(token.position, (n * kWarpSize + lane) * shape.group + head), changes[n]);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int d = part * kReplayDims + 4 * lane;
        if (!own.values || d >= shape.head_size) continue;
        const float4 value =
            load4(args_.tensors.values, args_.tensors.type,
                  (std::int64_t{unit_} * shape.tokens + token.position) * shape.head_size + d);
        values[part].x = fmaf(e, value.x, values[part].x);
        values[part].y = fmaf(e, value.y, values[part].y);
        values[part].z = fmaf(e, value.z, values[part].z);
        values[part].w = fmaf(e, value.w, values[part].w);
      }
    }
#pragma unroll
    for (int n = 0; n < kDraws; ++n)
      if (n * kWarpSize + lane < draws)
        own.changes[(n * kWarpSize + lane) * shape.group + head] = changes[n];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int d = part * kReplayDims + 4 * lane;
      if (own.values && d < shape.head_size)
        *reinterpret_cast<float4*>(own.values + head * shape.head_size + d) = values[part];
    }
    return sum;
  }

  /// Bits of the tokens attended whose positions are in [first, …), to words [0, query / 32].
  __device__ void mark(std::uint32_t* words, const Window& window, std::uint32_t first) const {
    const auto below = [](std::uint32_t n) { return n < 32 ? (1u << n) - 1 : ~0u; };
    for (std::uint32_t w = lane_; w * 32 <= query_; w += kWarpSize) {
      const auto before = [&](std::uint32_t end) { return below(end - min(end, w * 32)); };
      const std::uint32_t attended = before(window.sinks) | ~before(window.first);
      words[w] = attended & before(query_ + 1) & ~before(first);
    }
  }
  __device__ void note_kept(int config, const Window& window) const {
    const ReplayFigures& figures = args_.figures;
    mark(figures.kept +
             (args_.figure_of(unit_, config) * args_.shape.tokens + query_) * figures.words,
         window, 0);
  }
  __device__ void leave_kept(std::int64_t kept, const Window& window, float total, bool whole,
                             bool squeezed, bool lost) const {
    const ReplaySamples& samples = args_.samples;
    mark(samples.shared + kept * samples.words, window,
         lost       ? query_ + 1
         : squeezed ? window.first
                    : 0);
    if (lane_ < kHeads) samples.samples[kept].sums[lane_] = total;
    if (lane_ == 0) {
      samples.samples[kept].whole = whole;
      samples.samples[kept].own = squeezed || lost;
    }
  }

  const ReplayArgs& args_;
  WindowShared<kQuads>& shared_;
  const int i_, first_member_, unit_;
  const std::uint32_t query_;
  const int index_;
  const std::int64_t row_;
  const std::uint32_t lane_, warp_;
  std::uint32_t chunk_;  ///< tokens of a chunk
  const float4 *full_[kQuads], *squeezed_[kQuads];
  float4 least_[kQuads];
};

/// A block for each query (x) and unit, or unit of a member (y).
template <int kQuads>
__global__ void __launch_bounds__(kThreads)
    windows_kernel(const __grid_constant__ ReplayArgs args) {
  __shared__ WindowShared<kQuads> shared;
  WindowQuery<kQuads>(args, shared).run();
}

/// A block for each member (x) and unit (y), a thread for each sum and head: the queries in order.
__global__ void figures_kernel(const __grid_constant__ ReplayArgs args) {
  const int heads = 4 * args.shape.quads(), kind = static_cast<int>(threadIdx.x) / heads,
            head = static_cast<int>(threadIdx.x) % heads;
  if (kind >= 4 || head >= args.shape.group) return;
  const std::int64_t unit = blockIdx.y,
                     figure = unit * args.figures.configs + args.members[blockIdx.x];
  const float4* const from =
      args.windows + (unit * args.member_count + blockIdx.x) * args.rows.block * heads;
  for (int i = 0; i < args.rows.count; ++i) {
    const int index = args.span.index[args.rows.first + i];
    if (index < 0) continue;
    const float value = component(from[i * heads + head], kind);
    figure_sum(args, figure, static_cast<Sum>(kind), head, span_block(args.span, index)) += value;
    if (kind == 0) figure_recall(args, figure, index, head) = value;
  }
}

}  // namespace

cudaError_t replay_windows(const ReplayArgs& args, cudaStream_t stream) {
  const ReplayShape& shape = args.shape;
  if (shape.group < 1 || shape.group > kMostReplayGroup || shape.head_size % 4 != 0 ||
      shape.head_size > kMostReplayHeadSize || args.rows.count < 1 || args.member_count < 1 ||
      shape.units < 1 || shape.units > 65535)
    return cudaErrorInvalidValue;
  const dim3 queries(
      static_cast<unsigned>(args.rows.count),
      static_cast<unsigned>(args.own_units ? args.member_count * args.own_units : shape.units));
  if (shape.quads() == 1)
    windows_kernel<1><<<queries, kThreads, 0, stream>>>(args);
  else
    windows_kernel<2><<<queries, kThreads, 0, stream>>>(args);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess || !args.figures.sums)
    return error;
  const dim3 caches(static_cast<unsigned>(args.member_count), static_cast<unsigned>(shape.units));
  figures_kernel<<<caches, 4 * 4 * shape.quads(), 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace kvlab::kernels
