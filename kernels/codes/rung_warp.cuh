// What one warp does with a tile of a rung's rows: TensorCoreWarp, over codes. Products are of
// whole numbers, which 16-bit elements hold; scales are multiplied in float32 behind them, a block
// of channels at a time. The queries stand behind the butterflies, in two fp16 elements each; so
// does the output from the first code on, as rungs go down: it is turned back at the end. A minimum
// adds the same to all 32 channels there, which is one channel of the output.
//
// Below 8 bits unpacking takes longer than fetching: a tile takes as long with 4 bits as with 2.
#pragma once

#include "kernels/codes/code.cuh"
#include "kernels/decode/decode_tile.cuh"

namespace kvlab::kernels {

/// What lies ahead of a tile in shared memory.
struct alignas(16) TileHead {
  DeviceForm form;
  int valid;          ///< rows that count, from the first; none: nothing was fetched
  std::uint32_t row;  ///< the pair's, of the first
};

/// So many bytes to words, as few loads as their alignment allows.
template <int kBytes>
__device__ inline void load_words(const unsigned char* from,
                                  std::uint32_t (&to)[(kBytes + 3) / 4]) {
  if constexpr (kBytes % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) {
      const uint4 four = reinterpret_cast<const uint4*>(from)[i];
      to[4 * i] = four.x, to[4 * i + 1] = four.y, to[4 * i + 2] = four.z, to[4 * i + 3] = four.w;
    }
  } else if constexpr (kBytes % 8 == 0) {
#pragma unroll
    for (int i = 0; i < kBytes / 8; ++i) {
      const uint2 two = reinterpret_cast<const uint2*>(from)[i];
      to[2 * i] = two.x, to[2 * i + 1] = two.y;
    }
  } else if constexpr (kBytes % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kBytes / 4; ++i) to[i] = reinterpret_cast<const std::uint32_t*>(from)[i];
  } else {
#pragma unroll
    for (std::uint32_t& word : to) word = 0;
#pragma unroll
    for (int i = 0; i < kBytes; ++i) to[i / 4] |= std::uint32_t{from[i]} << i % 4 * 8;
  }
}

__device__ inline std::uint32_t minus_1024(std::uint32_t two) {
  const __half2 less = __hsub2(reinterpret_cast<const __half2&>(two), __float2half2_rn(1024));
  return reinterpret_cast<const std::uint32_t&>(less);
}
__device__ inline std::uint32_t minus_128(std::uint32_t two) {
  const __nv_bfloat162 less =
      __hsub2(reinterpret_cast<const __nv_bfloat162&>(two), __floats2bfloat162_rn(128, 128));
  return reinterpret_cast<const std::uint32_t&>(less);
}
/// Two e4m3, the lower bytes, as fp16.
__device__ inline std::uint32_t halves_of_e4m3(std::uint32_t two) {
  const __half2_raw halves =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two), __NV_E4M3);
  return std::uint32_t{halves.x} | std::uint32_t{halves.y} << 16;
}

/// A lane's eight channels of block `b` of a key, n and n + 4 to word n, in fp16.
template <int kBits, bool kFloating, int kWords>
__device__ inline void unpack_key(const std::uint32_t (&words)[kWords], int b,
                                  std::uint32_t (&to)[4]) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    if constexpr (kFloating) {
      to[n] = halves_of_e4m3(words[2 * b + n / 2] >> n % 2 * 16);
    } else if constexpr (kBits == 8) {
      to[n] =
          minus_1024(__byte_perm(words[2 * b + n / 2], 0x64646464u, n % 2 == 0 ? 0x4140 : 0x4342));
    } else if constexpr (kBits == 4) {
      to[n] = minus_1024((words[b] >> 4 * n & 0x000f000fu) | 0x64006400u);
    } else {
      const std::uint32_t apart = __byte_perm(words[b / 2], 0, b % 2 == 0 ? 0x4140 : 0x4342);
      to[n] = minus_1024((apart >> 2 * n & 0x00030003u) | 0x64006400u);
    }
  }
}

/// Of two values a lane's four channels of block `b`, one of both to a word, in bf16.
template <int kBits, bool kFloating, int kWords>
__device__ inline void unpack_values(const std::uint32_t (&low)[kWords],
                                     const std::uint32_t (&high)[kWords], int b,
                                     std::uint32_t (&to)[4]) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    if constexpr (kFloating) {
      const float2 two = unpack<__half>(
          halves_of_e4m3(__byte_perm(low[b], high[b], static_cast<unsigned>(n | (4 + n) << 4))));
      to[n] = pack<__nv_bfloat16>(two.x, two.y);
    } else if constexpr (kBits == 8) {
      constexpr float kMagic = 8388608;  // 2^23, whose last byte counts
      const auto number = [n](std::uint32_t word) {
        return __uint_as_float(__byte_perm(word, 0x4b000000u, static_cast<unsigned>(0x7540 | n))) -
               kMagic;
      };
      to[n] = pack<__nv_bfloat16>(number(low[b]), number(high[b]));
    } else if constexpr (kBits == 4) {
      const std::uint32_t both = __byte_perm(low[b / 2], high[b / 2], b % 2 == 0 ? 0x5410 : 0x7632);
      to[n] = minus_128((both >> 4 * n & 0x000f000fu) | 0x43004300u);
    } else {
      const unsigned own = static_cast<unsigned>(b % 4);
      const std::uint32_t both =
          __byte_perm(low[b / 4], high[b / 4], own | own << 4 | (4 + own) << 8 | (4 + own) << 12);
      to[n] = minus_128((both >> 2 * n & 0x00030003u) | 0x43004300u);
    }
  }
}

template <class T, int kDim>
class RungWarp : public TensorCoreWarp<T, kDim, Rotated::none, 8> {
  using Base = TensorCoreWarp<T, kDim, Rotated::none, 8>;
  static constexpr int kBlocks = kDim / kWarpSize, kRows = static_cast<int>(kRowsOfTile);

 public:
  /// `turned`: the queries behind the butterflies, divided by kCodeBlock, [head, dim].
  __device__ void start(const T* query, int group, const float* turned) {
    Base::start(query, group);
    plain_ = query;
    turned_ = turned;
    behind_ = false;
  }

  /// `scratch`: of a part, its own. `owners`: slots of the pair's rows.
  __device__ void add(const TileHead& head, const unsigned char* tile, const WarpPart& scratch,
                      const std::uint32_t* owners, const TileUse& use, float base2_scale) {
    float weights[1][4];
    auto& weight = weights[0];
    const bool exact = head.form.exact();
    const auto& as_it_is = *reinterpret_cast<const typename Base::Tile*>(tile);
    if (exact)
      Base::score(as_it_is, weights);
    else
      score_codes(head.form, tile, scratch, weight);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      weight[i] = i / 2 * 8 + Base::row() < head.valid ? weight[i] * base2_scale : -INFINITY;
    if (use.logits != nullptr) leave(weight, head, owners, use);
    const float2 before = Base::max_[0];
    Base::raise_max(0, make_float2(fmaxf(weight[0], weight[2]), fmaxf(weight[1], weight[3])));
    if (behind_) {
      const float2 factor =
          make_float2(rescale(before.x, Base::max_[0].x), rescale(before.y, Base::max_[0].y));
#pragma unroll
      for (float2& least : least_) least = make_float2(least.x * factor.x, least.y * factor.y);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      weight[i] = exp2_fast(weight[i] - (i % 2 ? Base::max_[0].y : Base::max_[0].x));
    Base::sum_[0].x += weight[0] + weight[2];
    Base::sum_[0].y += weight[1] + weight[3];
    if (exact)
      Base::add_values(as_it_is, weights);
    else
      add_codes(head.form, tile, weight);
  }

  __device__ void finish(const WarpPart& part) {
    Base::finish(part);
    if (!behind_) return;
    __syncwarp();
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int lanes = 4; lanes < kWarpSize; lanes *= 2) {
        least_[b].x += __shfl_xor_sync(~0u, least_[b].x, lanes);
        least_[b].y += __shfl_xor_sync(~0u, least_[b].y, lanes);
      }
    store(part);
    for (int head = 0; head < Base::group_; ++head)
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        float& out = part.out[head * kDim + b * kWarpSize + code_lane()];
        const float least = __shfl_sync(~0u, head % 2 == 0 ? least_[b].x : least_[b].y, head / 2);
        out = butterfly(out) / kCodeBlock + (code_lane() == 0 ? least : 0);
      }
  }

 private:
  // What a lane has of a head's output behind the butterflies: channels b * 32 + row() * 4 and the
  // next three.
  __device__ static int channel(int n, int half) {
    return n / 2 * kWarpSize + Base::row() * 4 + n % 2 * 2 + half;
  }
  /// The output as it is, to where others see it. Ends with a barrier.
  __device__ void store(const WarpPart& part) const {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int n = 0; n < kDim / 16; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          if (const int head = Base::column() + i; head < Base::group_)
            part.out[head * kDim + channel(n, half)] = Base::out_[0][n][half * 2 + i];
    __syncwarp();
  }

  /// Output and queries go behind the butterflies.
  __device__ void turn(const WarpPart& scratch) {
    behind_ = true;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int n = 0; n < kDim / 16; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          if (const int head = Base::column() + i; head < Base::group_)
            scratch.out[head * kDim + n * 16 + half * 8 + Base::row()] =
                Base::out_[0][n][half * 2 + i];
    __syncwarp();
    for (int at = code_lane(); at < Base::group_ * kDim; at += kWarpSize)
      scratch.out[at] = butterfly(scratch.out[at]);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int n = 0; n < kDim / 16; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          if (const int head = Base::column() + i; head < Base::group_)
            Base::out_[0][n][half * 2 + i] = scratch.out[head * kDim + channel(n, half)];
    __syncwarp();
    const bool own = Base::row() < Base::group_;
    const float* const query = turned_ + (own ? Base::row() : 0) * kDim + Base::column() * 4;
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = k / 2 * kWarpSize + k % 2 * 2 + i;
        const float low = own ? query[at] : 0, high = own ? query[at + 4] : 0;
        Base::query_[0][k][i] = pack<__half>(low, high);
        const float2 kept = unpack<__half>(Base::query_[0][k][i]);
        rest_[k][i] = pack<__half>(low - kept.x, high - kept.y);
      }
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const auto first = [&](int head) {
        return head < Base::group_ ? to_float(plain_[head * kDim + b * kWarpSize]) : 0.0f;
      };
      firsts_[b] = make_float2(first(Base::column()), first(Base::column() + 1));
      least_[b] = make_float2(0, 0);
    }
  }

  /// A block's scale and minimum.
  template <bool kFloating>
  __device__ static float2 metadata(const unsigned char* from, int row, int b) {
    if constexpr (kFloating)
      return make_float2(__uint_as_float(std::uint32_t{from[row * kBlocks + b]} << 23), 0);
    else
      return __half22float2(reinterpret_cast<const __half2*>(from)[row * kBlocks + b]);
  }

  template <int kBits, bool kFloating>
  __device__ void score_as(const unsigned char* keys, float (&logit)[4]) const {
    constexpr int kRow = kDim * kBits / 8, kLane = kRow / 4;
    const unsigned char* const scales = keys + kRows * kRow;
    std::uint32_t upper[(kLane + 3) / 4], lower[(kLane + 3) / 4];
    load_words<kLane>(keys + Base::row() * kRow + Base::column() / 2 * kLane, upper);
    load_words<kLane>(keys + (Base::row() + 8) * kRow + Base::column() / 2 * kLane, lower);
#pragma unroll
    for (float& one : logit) one = 0;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      std::uint32_t u[4], l[4];
      unpack_key<kBits, kFloating>(upper, b, u);
      unpack_key<kBits, kFloating>(lower, b, l);
      float sums[2][4] = {};
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const std::uint32_t a[4] = {u[2 * k], l[2 * k], u[2 * k + 1], l[2 * k + 1]};
        const auto &query = Base::query_[0][2 * b + k], &rest = rest_[2 * b + k];
        multiply_add<__half>(sums[0], a, query[0], query[1]);
        multiply_add<__half>(sums[1], a, rest[0], rest[1]);
      }
      const float2 of_upper = metadata<kFloating>(scales, Base::row(), b),
                   of_lower = metadata<kFloating>(scales, Base::row() + 8, b);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 own = i < 2 ? of_upper : of_lower;
        logit[i] = fmaf(own.x, sums[0][i] + sums[1][i], logit[i]);
        if constexpr (!kFloating)
          logit[i] = fmaf(own.y, i % 2 == 0 ? firsts_[b].x : firsts_[b].y, logit[i]);
      }
    }
  }

  template <int kBits, bool kFloating>
  __device__ void add_as(const unsigned char* values, const float (&weight)[4]) {
    constexpr int kRow = kDim * kBits / 8, kLane = kRow / 8, kWords = (kLane + 3) / 4;
    const unsigned char* const scales = values + kRows * kRow;
    std::uint32_t words[4][kWords];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      load_words<kLane>(values + (Base::column() + i % 2 + i / 2 * 8) * kRow + Base::row() * kLane,
                        words[i]);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const float2 of_upper = metadata<kFloating>(scales, Base::row(), b),
                   of_lower = metadata<kFloating>(scales, Base::row() + 8, b);
      if constexpr (!kFloating) {
        least_[b].x = fmaf(weight[0], of_upper.y, fmaf(weight[2], of_lower.y, least_[b].x));
        least_[b].y = fmaf(weight[1], of_upper.y, fmaf(weight[3], of_lower.y, least_[b].y));
      }
      const std::uint32_t w[2] = {
          transpose_matrix(pack<__nv_bfloat16>(weight[0] * of_upper.x, weight[1] * of_upper.x)),
          transpose_matrix(pack<__nv_bfloat16>(weight[2] * of_lower.x, weight[3] * of_lower.x))};
      std::uint32_t first[4], second[4];
      unpack_values<kBits, kFloating>(words[0], words[1], b, first);
      unpack_values<kBits, kFloating>(words[2], words[3], b, second);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const std::uint32_t a[4] = {first[2 * n], first[2 * n + 1], second[2 * n],
                                    second[2 * n + 1]};
        multiply_add<__nv_bfloat16>(Base::out_[0][2 * b + n], a, w[0], w[1]);
      }
    }
  }

  __device__ void score_codes(const DeviceForm& form, const unsigned char* tile,
                              const WarpPart& scratch, float (&logit)[4]) {
    if (!behind_) turn(scratch);
    if (form.floating)
      score_as<8, true>(tile, logit);
    else if (form.key_bits == 8)
      score_as<8, false>(tile, logit);
    else if (form.key_bits == 4)
      score_as<4, false>(tile, logit);
    else
      score_as<2, false>(tile, logit);
  }
  __device__ void add_codes(const DeviceForm& form, const unsigned char* tile,
                            const float (&weight)[4]) {
    const unsigned char* const values =
        tile + kRows * (code_bytes(form, true, kDim, 0) + metadata_bytes(form, kDim));
    if (form.floating)
      add_as<8, true>(values, weight);
    else if (form.value_bits == 8)
      add_as<8, false>(values, weight);
    else if (form.value_bits == 4)
      add_as<4, false>(values, weight);
    else
      add_as<2, false>(values, weight);
  }

  __device__ void leave(const float (&logit)[4], const TileHead& head, const std::uint32_t* owners,
                        const TileUse& use) const {
    if (Base::column() >= Base::group_) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = half * 8 + Base::row();
      if (row >= head.valid) continue;
      float* const to =
          use.logits +
          std::int64_t{owners[head.row + static_cast<std::uint32_t>(row)]} * use.logits_stride +
          Base::column();
      if (use.logits_stride == 1)
        *to = logit[half * 2];
      else
        *reinterpret_cast<float2*>(to) = make_float2(logit[half * 2], logit[half * 2 + 1]);
    }
  }

  const T* plain_;
  const float* turned_;
  bool behind_;
  std::uint32_t rest_[kDim / 16][2];         // of the queries behind the butterflies
  float2 firsts_[kBlocks], least_[kBlocks];  // of two heads; least_: over this lane's rows alone
};

}  // namespace kvlab::kernels
