// A cache's figures over a block of queries: sums, and what it leaves for its outputs.
#pragma once

#include <type_traits>

#include "kernels/device/load.cuh"
#include "kernels/replay/own.cuh"

namespace kvlab::kernels {

/// Arguments whose sets are those of configurations with codes alone.
inline ReplayArgs with_codes(ReplayArgs args) {
  args.samples.sets += args.samples.tiles * kReplayTile;
  args.samples.tiles = args.samples.coded_tiles;
  return args;
}

/// Whether a configuration's outputs are coded_outputs_kernel()'s.
__device__ inline bool has_codes(const ReplayArgs& args, int config) {
  return args.copies.count > 0 && args.rules[config].copies > 1;
}

/// Which block of the span a query is summed in.
__device__ inline int span_block(const ReplaySpan& span, int index) {
  return static_cast<int>(std::int64_t{index} * span.blocks / span.size);
}

/// Where a figure of a cache and query head is summed.
__device__ inline double& figure_sum(const ReplayArgs& args, std::int64_t figure, Sum sum, int head,
                                     int block) {
  const SumsShape shape{static_cast<std::size_t>(args.shape.quads()),
                        static_cast<std::size_t>(args.span.named_count)};
  return args.figures
      .sums[static_cast<std::size_t>(figure) * shape.size() +
            shape.at(sum, static_cast<std::size_t>(head), static_cast<std::size_t>(block))];
}

/// Where the recall of query `index` of the span is noted.
__device__ inline float& figure_recall(const ReplayArgs& args, std::int64_t figure, int index,
                                       int head) {
  return args.figures.recalls[(figure * args.shape.group + head) * args.span.size + index];
}

/// A query's terms.
struct QueryTerms {
  const float* first;   // [token, draw, group]
  std::int64_t stride;  ///< of tokens
  int columns;          ///< draws times group

  __device__ QueryTerms(const ReplayArgs& args, std::int64_t unit, int index)
      : columns(args.samples.draws * args.shape.group) {
    stride = std::int64_t{kReplayTerms} * columns;
    first = args.samples.terms + unit * args.shape.tokens * stride +
            std::int64_t{index - args.samples.first_term} * columns;
  }
  __device__ float at(std::uint32_t token, int column) const {
    return first[token * stride + column];
  }
  /// Of a copy's values.
  __device__ QueryTerms of(const ReplayCopies& copies, int copy) const {
    QueryTerms terms = *this;
    terms.first += copy * copies.terms;
    return terms;
  }
};

/// What query i of the block keeps of the probability of each named span before it, and all of it:
/// a warp for each span. `live`: bits of the live positions. By the whole block, apart from its
/// caller.
template <int kQuads>
__device__ __noinline__ void add_named_sums(const ReplayPlace& at, const std::uint32_t* live,
                                            int i) {
  const ReplayArgs& args = at.args;
  const int query = args.rows.first + i, block = span_block(args.span, args.span.index[query]);
  for (int s = static_cast<int>(at.warp); s < args.span.named_count;
       s += static_cast<int>(at.warps)) {
    const int2 named = args.span.named[s];
    if (named.y > query) continue;
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      const std::int64_t row = at.row(i) * kQuads + quad;
      const float4* const e = args.rows.e + row * args.shape.tokens;
      float4 kept{}, all{};
      for (int token = named.x + static_cast<int>(at.lane); token < named.y; token += kWarpSize) {
        const float4 x = e[token];
        add(all, x);
        if (live[token / 32] >> token % 32 & 1) add(kept, x);
      }
      const float of_kept = warp_fold4(kept, Add{}), of_all = warp_fold4(all, Add{});
      const int head = 4 * quad + static_cast<int>(at.lane);
      if (at.lane < 4 && head < args.shape.group) {
        const double sum = component(args.rows.sums[row], static_cast<int>(at.lane));
        figure_sum(args, at.figure(), kept_of(s), head, block) += of_kept / sum;
        figure_sum(args, at.figure(), all_of(s), head, block) += of_all / sum;
      }
    }
  }
  __syncthreads();
}

/// Recall, its logarithm and misses: kept sums become recalls, then a thread adds up each sum and
/// head. By the whole block.
class RecallSums {
 public:
  __device__ RecallSums(const ReplayPlace& at, ReplayShared& shared)
      : at_(at), shared_(shared), quads_(at.args.shape.quads()) {}

  __device__ void add() {
    const ReplayArgs& args = at_.args;
    const auto group = static_cast<std::uint32_t>(args.shape.group),
               count = static_cast<std::uint32_t>(args.rows.count);
    for (std::uint32_t n = at_.thread; n < count * group; n += at_.threads) {
      const int i = static_cast<int>(n / group), head = static_cast<int>(n % group);
      const int index = args.span.index[args.rows.first + i];
      if (index < 0) continue;
      resolve(i, head);
      figure_recall(args, at_.figure(), index, head) = shared_.kept[i][head];
    }
    __syncthreads();
    for (std::uint32_t n = at_.thread; n < 4 * group; n += at_.threads)
      add(static_cast<Sum>(n / group), static_cast<int>(n % group));
  }

 private:
  __device__ void resolve(int i, int head) {
    float& kept = shared_.kept[i][head];
    std::uint32_t& hits = shared_.hits[i][head];
    if (kept < 0) {
      kept = 1;
      hits = wanted(i, head);
    } else {
      kept /= of_head(at_.args.rows.sums, i, head);
      // The query's own token is kept, and does not count.
      const std::int64_t tokens = at_.args.shape.tokens;
      const float4* const row =
          at_.args.rows.e + (at_.row(i) * quads_ + head / 4) * tokens + at_.args.rows.first + i;
      const float least = of_head(at_.args.rows.least, i, head);
      if (least <= 0)
        hits = shared_.visible[i] - 1;
      else if (component(*row, head % 4) >= least)
        --hits;
    }
    nll(i, head) = static_cast<float>(-log(fmax(double{kept}, 1e-9)));
  }
  __device__ void add(Sum kind, int head) {
    const ReplayArgs& args = at_.args;
    for (int i = 0; i < args.rows.count; ++i) {
      const int index = args.span.index[args.rows.first + i];
      if (index < 0) continue;
      double value = shared_.kept[i][head];
      if (kind == Sum::nll) value = nll(i, head);
      if (kind == Sum::missed) value = wanted(i, head) - shared_.hits[i][head];
      if (kind == Sum::wanted) value = wanted(i, head);
      figure_sum(args, at_.figure(), kind, head, span_block(args.span, index)) += value;
    }
  }
  __device__ float& nll(int i, int head) {
    return (&shared_.scratch[0][0])[i * kMostReplayGroup + head];
  }
  template <class T>
  __device__ auto of_head(const T* rows, int i, int head) const {
    return reinterpret_cast<const float*>(rows + at_.row(i) * quads_)[head];
  }
  __device__ std::uint32_t wanted(int i, int head) const {
    return reinterpret_cast<const std::uint32_t*>(at_.args.rows.wanted + at_.row(i) * quads_)[head];
  }

  const ReplayPlace& at_;
  ReplayShared& shared_;
  const int quads_;
};

/// What a cache's own exponentials are multiplied with: the values of the tokens before position
/// `end` in slots [0, count).
struct OwnValues {
  const std::uint32_t* positions;  ///< by slot
  std::uint32_t count, end;
  std::int64_t unit;
  const float4* own;  // [quad, slot], unit_slots apart
};

/// Exponentials by terms instead, to `to` [draw, group], by the whole block.
template <class Copies>
__device__ __noinline__ inline void sum_own_terms(const ReplayArgs& args, OwnValues of,
                                                  QueryTerms terms, const Copies copies,
                                                  float* to) {
  const std::uint32_t lane = threadIdx.x % kWarpSize;
  for (int column = static_cast<int>(threadIdx.x / kWarpSize); column < terms.columns;
       column += static_cast<int>(blockDim.x / kWarpSize)) {
    const int head = column % args.shape.group;
    const float4* const own = of.own + head / 4 * args.caches.unit_slots;
    float sum = 0;
    for (std::uint32_t slot = lane; slot < of.count; slot += kWarpSize) {
      const std::uint32_t position = of.positions[slot];
      if (position < of.end)
        sum = fmaf(component(own[slot], head % 4),
                   terms.of(args.copies, copies(slot)).at(position, column), sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) to[column] = sum;
  }
}

/// Those of tokens in codes, a thread for each number of `to` [group, dim]. Seldom called.
template <class Copies>
__device__ __noinline__ void sum_coded_values(const ReplayArgs& args, OwnValues of,
                                              const Copies copies, float* to) {
  const ReplayShape& shape = args.shape;
  const ReplayTensors& tensors = args.tensors;
  for (int n = static_cast<int>(threadIdx.x); n < shape.group * shape.head_size;
       n += static_cast<int>(blockDim.x)) {
    const int head = n / shape.head_size, d = n % shape.head_size;
    const float4* const own = of.own + head / 4 * args.caches.unit_slots;
    float sum = 0;
    for (std::uint32_t slot = 0; slot < of.count; ++slot) {
      const int copy = copies(slot);
      const std::int64_t at = (of.unit * shape.tokens + of.positions[slot]) * shape.head_size + d;
      if (of.positions[slot] < of.end)
        sum = fmaf(component(own[slot], head % 4),
                   copy == 0 ? load1(tensors.values, tensors.type, at)
                             : copied(args.copies, args.copies.values, tensors.type, copy, at),
                   sum);
    }
    to[n] = sum;
  }
}

/// Four elements of a value as they lie in memory.
template <class T>
using FourBits = std::conditional_t<sizeof(T) == 4, uint4, uint2>;

/// Some tokens' values, four elements each, and exponentials.
template <class Bits, int kTokens, int kQuads>
struct OwnTokens {
  Bits value[kTokens];
  float4 e[kTokens][kQuads];
};

/// Exponentials by those values. To `to` [group, dim], not divided by the sum. By the whole block,
/// apart from its caller, whose registers it would take. Bits: what four elements of a value take.
template <int kQuads, class Bits>
__device__ __noinline__ void sum_own_values(const ReplayArgs& args, OwnValues of,
                                            float (*scratch)[kReplayDims], float* to) {
  constexpr int kHeads = 4 * kQuads, kAtOnce = 8 / kQuads, kSums = kReplayScratch / kHeads;
  const ReplayShape& shape = args.shape;
  const std::uint32_t warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize,
                      warps = blockDim.x / kWarpSize;
  const Bits* const values =
      static_cast<const Bits*>(args.tensors.values) + of.unit * shape.tokens * shape.head_size / 4;
  using Tokens = OwnTokens<Bits, kAtOnce, kQuads>;
  for (int first = 0; first < shape.head_size; first += kReplayDims) {
    const int d = first + 4 * static_cast<int>(lane);
    float4 sums[kHeads] = {};
    const auto fetch = [&](std::uint32_t base) {
      Tokens tokens;
#pragma unroll
      for (std::uint32_t n = 0; n < kAtOnce; ++n) {
        const std::uint32_t slot = base + n,
                            position = slot < of.count ? of.positions[slot] : of.end;
        const bool is = position < of.end;
        const std::int64_t at = (std::int64_t{position} * shape.head_size + d) / 4;
        tokens.value[n] = is && d < shape.head_size ? __ldg(values + at) : Bits{};
#pragma unroll
        for (int quad = 0; quad < kQuads; ++quad)
          tokens.e[n][quad] = is ? of.own[quad * args.caches.unit_slots + slot] : float4{};
      }
      return tokens;
    };
    Tokens ahead = fetch(warp * kAtOnce);
    for (std::uint32_t base = warp * kAtOnce; base < of.count; base += warps * kAtOnce) {
      const Tokens tokens = ahead;
      ahead = fetch(base + warps * kAtOnce);
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const float2 low = two_of(tokens.value[n], args.tensors.type, 0),
                     high = two_of(tokens.value[n], args.tensors.type, 1);
#pragma unroll
        for (int head = 0; head < kHeads; ++head) {
          const float weight = component(tokens.e[n][head / 4], head % 4);
          float4& sum = sums[head];
          sum.x = fmaf(weight, low.x, sum.x), sum.y = fmaf(weight, low.y, sum.y);
          sum.z = fmaf(weight, high.x, sum.z), sum.w = fmaf(weight, high.y, sum.w);
        }
      }
    }
    // Some sums side by side, each of its warps in order.
    for (std::uint32_t round = 0; round * kSums < warps; ++round) {
      if (warp / kSums == round)
#pragma unroll
        for (int head = 0; head < kHeads; ++head) {
          float4& sum =
              *reinterpret_cast<float4*>(&scratch[warp % kSums * kHeads + head][4 * lane]);
          if (round > 0) add(sums[head], sum);
          sum = sums[head];
        }
      __syncthreads();
    }
    for (std::uint32_t n = threadIdx.x; n < shape.group * kWarpSize; n += blockDim.x) {
      const std::uint32_t head = n / kWarpSize, at = 4 * (n % kWarpSize);
      if (first + static_cast<int>(at) >= shape.head_size) continue;
      float4 sum{};
      for (std::uint32_t part = 0; part < min(kSums, warps); ++part)
        add(sum, *reinterpret_cast<const float4*>(&scratch[part * kHeads + head][at]));
      *reinterpret_cast<float4*>(to + head * shape.head_size + first + at) = sum;
    }
    __syncthreads();
  }
}

}  // namespace kvlab::kernels
