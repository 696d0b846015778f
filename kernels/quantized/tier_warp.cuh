// How one warp processes tiles of a tier's rows: ExactWarp for exact rows, QuantizedWarp for
// quantized ones. A row is the key and value of one token, a tile is kRowsOfTile rows, and the
// layout of a tile is described at DeviceTier. tier_attention.cu calls QuantizedWarp::begin() for
// each tier, and add() for each tile. Keys of integer formats are multiplied as bytes, with queries
// that are quantized to two digits of 8 bits; fp8 keys are multiplied in fp16. Values are
// multiplied with weights in fp16. The scales of keys are applied in float32, after the products.
// The scales of values are applied to the weights, before the products.
//
// Quantized keys and values are stored after the Hadamard rotation, so the queries are rotated too.
// hadamard_rotate_block() does not normalize: rotating twice multiplies by kQuantBlock, so each way
// back ends with a division by it. Tiers are processed from the most to the least precise. Before
// the first quantized tier, the output so far is rotated as well, and the final output is rotated
// back.
//
// A number of an integer format is the stored integer times the block's scale plus the block's
// minimum. So the minimum adds the same amount to all 32 channels of the block. In a product with a
// query, this is the minimum times the sum of the block's query channels. After the rotation and
// the division by kQuantBlock, that sum equals the first channel of the block before the rotation
// (HadamardQuery::firsts).
//
// A tensor-core product has eight columns: two for each of four query heads. In products with keys,
// the two columns of a head are the two digits of the query. In products with values, they are the
// weights times the scales of two neighbouring blocks, and the output of each block is read from
// the column of that block.
//
// In this file, l is the index of a lane in its warp.
#pragma once

#include <numeric>
#include <type_traits>

#include "kernels/decode/decode_tile.cuh"
#include "kernels/quantized/quantize.cuh"

namespace kvlab::kernels {

/// Where a warp stores its logits, and the factor that turns products into base-2 logits.
struct TierUse {
  float* logits;  ///< logits of the pair, [slot, logits_stride]; may be null
  int logits_stride;
  float base2_scale;

  __device__ void store(std::uint32_t slot, int head, float logit) const {
    logits[std::int64_t{slot} * logits_stride + head] = logit;
  }
};

/// A warp that processes tiles of exact rows. Of a product's result, a lane holds the elements i =
/// 0 to 3: row i / 2 * 8 + row() of the tile, for head column() + i % 2 (TensorCoreWarp).
template <class T, int kDim>
class ExactWarp : public TensorCoreWarp<T, kDim, Rotated::none, 8> {
  using Base = TensorCoreWarp<T, kDim, Rotated::none, 8>;

 public:
  /// Attends to the first `valid` rows of a tile. `slot_of_row`: the slots of the tile's rows,
  /// which are needed if `use` stores logits.
  __device__ void add(const typename Base::Tile& tile, int valid, const std::uint32_t* slot_of_row,
                      const TierUse& use) {
    float weights[1][4];  // logits until the maximum is known, then weights
    auto& weight = weights[0];
    Base::score(tile, weights);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      weight[i] = i / 2 * 8 + Base::row() < valid ? weight[i] * use.base2_scale : -INFINITY;
    if (use.logits != nullptr)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (i / 2 * 8 + Base::row() < valid && Base::column() + i % 2 < Base::group_)
          use.store(slot_of_row[i / 2 * 8 + Base::row()], Base::column() + i % 2, weight[i]);
    Base::raise_max(0, make_float2(fmaxf(weight[0], weight[2]), fmaxf(weight[1], weight[3])));
#pragma unroll
    for (int i = 0; i < 4; ++i)
      weight[i] = exp2_fast(weight[i] - (i % 2 ? Base::max_[0].y : Base::max_[0].x));
    Base::sum_[0].x += weight[0] + weight[2];
    Base::sum_[0].y += weight[1] + weight[3];
    Base::add_values(tile, weights);
  }
};

/// The queries of a group, in shared memory.
struct HadamardQuery {
  float* values;   // [head, dim], after the Hadamard rotation and divided by kQuantBlock
  float* largest;  // [head, block]: the largest absolute value of `values` in the block
  float* firsts;   // [head, block]: the first channel of the block, before the Hadamard rotation

  __device__ HadamardQuery(float* memory, int group, int dim)
      : values(memory),
        largest(memory + group * dim),
        firsts(largest + group * dim / kQuantBlock) {}
  static constexpr std::size_t bytes(int group, int dim) {
    return static_cast<std::size_t>(group * (dim + dim / static_cast<int>(kQuantBlock) * 2)) *
           sizeof(float);
  }
  /// Sets element `at` of `values`. All lanes of a warp call it together, for the 32 channels of a
  /// block.
  template <class T>
  __device__ void set(int at, T query) const {
    const float own = to_float(query), rotated = hadamard_rotate_block(own) / kQuantBlock,
                max_value = warp_max(fabsf(rotated));
    values[at] = rotated;
    if (lane_id() != 0) return;
    largest[at / kQuantBlock] = max_value;
    firsts[at / kQuantBlock] = own;
  }
};

/// A format that is known at compile time. kFloating: fp8 (e4m3), otherwise integers.
template <int kKeyBits_, int kValueBits_, bool kFloating_ = false>
struct QuantFormat {
  static constexpr int kKeyBits = kKeyBits_, kValueBits = kValueBits_;
  static constexpr bool kFloating = kFloating_;
};

/// Consecutive elements that are loaded together.
template <class Element, int kCount>
struct alignas(std::gcd(static_cast<int>(sizeof(Element)) * kCount, 16)) Packed {
  Element elements[kCount];
};

/// Loads a lane's words of the quantized values of a tile. See quantized_bit().
template <int kWords>
__device__ inline void load_lane_words(const unsigned char* data, std::uint32_t (&to)[kWords]) {
  constexpr int kAtOnce = words_at_once(kWords);
  const auto* const from = reinterpret_cast<const Packed<std::uint32_t, kAtOnce>*>(data);
#pragma unroll
  for (int i = 0; i < kWords; i += kAtOnce) {
    const auto some = from[i / kAtOnce * kWarpSize + lane_id()];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) to[i + j] = some.elements[j];
  }
}

/// The scales and minima of a row's key or value. The metadata of a block is, for integer formats,
/// an fp16 scale and an fp16 minimum; for fp8, the biased exponent of a scale that is a power of
/// two. A lane loads the metadata of all blocks together, in words that are as large as alignment
/// allows.
template <int kBlocks, bool kFloating>
struct RowMetadata {
  using Word =
      std::conditional_t<!kFloating, std::uint32_t,
                         std::conditional_t<kBlocks % 4 == 0, std::uint32_t, std::uint8_t>>;
  using Own = Packed<Word, kBlocks*(kFloating ? 1 : 4) / static_cast<int>(sizeof(Word))>;
  static constexpr int kBytes = sizeof(Own);
  Own own;
  __device__ RowMetadata(const unsigned char* all, int row)
      : own(reinterpret_cast<const Own*>(all)[row]) {}
  __device__ float scale(int b) const {
    constexpr int kOfWord = sizeof(Word);  // blocks per word
    if constexpr (kFloating)
      return __uint_as_float((own.elements[b / kOfWord] >> b % kOfWord * 8 & 0xffu) << 23);
    else
      return __low2float(reinterpret_cast<const __half2&>(own.elements[b]));
  }
  __device__ float minimum(int b) const {
    if constexpr (kFloating)
      return 0;
    else
      return __high2float(reinterpret_cast<const __half2&>(own.elements[b]));
  }
};

/// Returns word & mask | bits.
__device__ inline std::uint32_t merge_bits(std::uint32_t word, std::uint32_t mask,
                                           std::uint32_t bits) {
  std::uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(word), "r"(mask), "r"(bits));
  return result;
}
/// Converts two integers of kBits bits, which begin at bits kAt and 16 + kAt of a word, to fp16.
/// The bits are not moved: they become fraction bits of an fp16 number between 2^(10 - kAt) and
/// twice that. In this range, bit kAt of the fraction has the value 1, so the number minus 2^(10 -
/// kAt) is the integer.
template <int kBits, int kAt>
__device__ inline std::uint32_t halves_at(std::uint32_t word) {
  constexpr std::uint32_t kMask = ((1u << kBits) - 1) << kAt, kOne = 0x3c00 + ((10 - kAt) << 10);
  static_assert(kAt + kBits <= 10);
  const std::uint32_t with = merge_bits(word, kMask * 0x10001u, kOne * 0x10001u);
  const __half2 less = __hsub2(reinterpret_cast<const __half2&>(with),
                               __float2half2_rn(static_cast<float>(1 << (10 - kAt))));
  return reinterpret_cast<const std::uint32_t&>(less);
}
/// Converts two e4m3 numbers, given as bytes, to fp16.
__device__ inline std::uint32_t halves_of_e4m3(std::uint32_t two) {
  const __half2_raw halves =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two), __NV_E4M3);
  return std::uint32_t{halves.x} | std::uint32_t{halves.y} << 16;
}

/// Unpacks the quantized numbers of keys that a lane holds of block `b` to bytes. to[0] and to[1]
/// get the even channels of rows r and r + 8 (r = l / 4), to[2] and to[3] the odd channels.
/// `words`: from load_lane_words(); quantized_bit() says where each number is.
template <int kBits, int kBlocks, int kWords>
__device__ inline void unpack_keys(const std::uint32_t (&words)[kWords], int b,
                                   std::uint32_t (&to)[4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int own = half * kBlocks + b;
    if constexpr (kBits == 8) {
      to[half] = words[2 * own], to[2 + half] = words[2 * own + 1];
    } else if constexpr (kBits == 4) {
      to[half] = words[own] & 0x0f0f0f0fu, to[2 + half] = words[own] >> 4 & 0x0f0f0f0fu;
    } else {
      const bool odd = (b | 1) >= kBlocks;
      const std::uint32_t word = words[odd ? b : half * (kBlocks / 2) + b / 2];
      // Byte j of fields(i) is channel 4 * (j % 2) + i of the word's first (j < 2) or second half.
      // own_bytes alternates between two fields, so that channels are in ascending order.
      const auto fields = [word](int i) { return word >> 2 * i & 0x03030303u; };
      const unsigned own_bytes = (odd ? half : b % 2) == 0 ? 0x5140 : 0x7362;
      to[half] = __byte_perm(fields(0), fields(2), own_bytes);
      to[2 + half] = __byte_perm(fields(1), fields(3), own_bytes);
    }
  }
}
/// Converts to fp16 the quantized elements of block `b` of values that the lane holds. to[0][i]
/// gets the lane's i-th channel of rows 2r and 2r + 1 (r = l % 4), to[1][i] that of rows 2r + 8 and
/// 2r + 9.
template <class Format, int kBlocks, int kWords>
__device__ inline void unpack_values(const std::uint32_t (&words)[kWords], int b,
                                     std::uint32_t (&to)[2][4]) {
  constexpr int kBits = Format::kValueBits;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int own = half * kBlocks + b;
    auto& pairs = to[half];
    if constexpr (Format::kFloating) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        pairs[i] =
            halves_of_e4m3(__byte_perm(words[2 * own + i / 2], 0, i % 2 == 0 ? 0x4420 : 0x4431));
    } else if constexpr (kBits == 8) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const std::uint32_t word = words[2 * own + i / 2];
        pairs[i] = halves_at<8, 0>(i % 2 == 0 ? word : word >> 8);
      }
    } else if constexpr (kBits == 4) {
      const std::uint32_t word = words[own], upper = word >> 8;
      pairs[0] = halves_at<4, 0>(word), pairs[1] = halves_at<4, 4>(word);
      pairs[2] = halves_at<4, 0>(upper), pairs[3] = halves_at<4, 4>(upper);
    } else {
      const bool odd = (b | 1) >= kBlocks;
      const std::uint32_t word =
          words[odd ? b : half * (kBlocks / 2) + b / 2] >> ((odd ? half : b % 2) == 0 ? 0 : 8);
      pairs[0] = halves_at<2, 0>(word), pairs[1] = halves_at<2, 2>(word);
      pairs[2] = halves_at<2, 4>(word), pairs[3] = halves_at<2, 6>(word);
    }
  }
}

/// c[16 x 8] += a[16 x 32] * b[32 x 8] in integers, where a is unsigned. With g = l / 4 and t = l %
/// 4, lane l holds: of a, rows g, g + 8, g, g + 8 at columns 4t, 4t, 16 + 4t, 16 + 4t, each with
/// the next three columns; of b, rows 4t and 16 + 4t, each with the next three rows, at column g;
/// of c, the same elements as in multiply_add().
__device__ inline void multiply_add_bytes(int (&c)[4], const std::uint32_t (&a)[4],
                                          std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// A warp that processes tiles of quantized values for kHeadGroups times four query heads. The
/// weight of a row is 2^(logit - reference), where `reference` is a number of each head. It is
/// chosen so that the largest product of a weight and a scale so far is between 2^13 and 2^15. Such
/// products fit in fp16, and products down to 2^-27 of the largest one keep all 11 bits of
/// precision of fp16.
template <int kDim, int kHeadGroups>
class QuantizedWarp {
  static constexpr int kBlocks = kDim / kWarpSize, kRows = static_cast<int>(kRowsOfTile);

 public:
  /// `part`: the result of the exact tiers, if there were any (`has_exact`). The warp continues
  /// from it, and finish() replaces it.
  __device__ QuantizedWarp(const HadamardQuery& query, int group, float base2_scale,
                           const WarpPart& part, bool has_exact)
      : query_(query), group_(group), base2_scale_(base2_scale) {
    __syncwarp();
    for (int at = lane_id(); has_exact && at < group * kDim; at += kWarpSize)
      part.out[at] = hadamard_rotate_block(part.out[at]);
    __syncwarp();
#pragma unroll
    for (int e = 0; e < kHeadGroups; ++e) {
      const bool known = has_exact && head(e) < group;
      const float2 state = known ? part.state[head(e)] : make_float2(-INFINITY, 0);
      reference_[e] = top_[e] = state.x;
      sum_[e] = row() == 0 ? state.y : 0;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) minima_[e][b] = 0;
#pragma unroll
      for (int n = 0; n < kDim / 16; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          out_[e][n][i] =
              known && i % 2 == column_of(n) ? part.out[head(e) * kDim + channel(n, i / 2)] : 0;
    }
  }

  /// Converts the queries to the operands that a format needs. Call it before the tiles of that
  /// format.
  template <class Format>
  __device__ void begin() {
    constexpr float kMax = 127 * 256;  // the upper digit has 8 bits with a sign
    const auto largest = [&](int head) {
      float max_value = 0;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
        max_value = fmaxf(max_value, query_.largest[head * kBlocks + b]);
      return max_value;
    };
#pragma unroll
    for (int e = 0; e < kHeadGroups; ++e) {
      const bool own = head(e) < group_;
      scale_[e] = own ? base2_scale_ : 0;
      if constexpr (!Format::kFloating) scale_[e] *= own ? largest(head(e)) / kMax : 0;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
        firsts_[e][b] = own ? query_.firsts[head(e) * kBlocks + b] * base2_scale_ : 0;
      // As operand B, the lane has column row(). So these are not the queries of head(e), of which
      // the lane holds results.
      const int column_head = 4 * e + row() / 2;
      const bool there = column_head < group_;
      const float* const values = query_.values + column_head * kDim + lane_id() % 4 * 8;
      const float max_value = there ? largest(column_head) : 0,
                  per_unit = max_value > 0 ? kMax / max_value : 0;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
#pragma unroll
        for (int n = 0; n < (Format::kFloating ? 4 : 2); ++n)
          query_of_[e][b][n] = !there ? 0
                               : Format::kFloating
                                   ? halves_of(values + b * kWarpSize + n / 2 + n % 2 * 4)
                                   : digits_of(values + b * kWarpSize + n, per_unit);
    }
  }

  /// See ExactWarp::add().
  template <class Format>
  __device__ void add(const unsigned char* tile, int valid, const std::uint32_t* slot_of_row,
                      const TierUse& use) {
    constexpr int kMetadata = kRows * RowMetadata<kBlocks, Format::kFloating>::kBytes,
                  kKeys = kRows * kDim * Format::kKeyBits / 8,
                  kValues = kRows * kDim * Format::kValueBits / 8;
    float logit[kHeadGroups][2];  // [head group]: of rows row() and row() + 8
    score<Format>(tile, logit);
#pragma unroll
    for (int i = 0; i < 2 * kHeadGroups; ++i)
      if (i % 2 * 8 + row() >= valid) logit[i / 2][i % 2] = -INFINITY;
    if (use.logits != nullptr)
#pragma unroll
      for (int i = 0; i < 2 * kHeadGroups; ++i)
        if (i % 2 * 8 + row() < valid && head(i / 2) < group_)
          use.store(slot_of_row[i % 2 * 8 + row()], head(i / 2), logit[i / 2][i % 2]);
    const unsigned char* const values = tile + kKeys + kMetadata;
    const RowMetadata<kBlocks, Format::kFloating> upper(values + kValues, row()),
        lower(values + kValues, row() + 8);
    std::uint32_t words[lane_words(Format::kValueBits, kBlocks)];
    load_lane_words(values, words);
    float p[kHeadGroups][2];
    std::uint32_t weights[kHeadGroups][(kBlocks + 1) / 2][2];
    // Once is enough, unless logits are so large that float32 cannot hold their differences. A loop
    // until all products fit would then never end.
    for (bool raised = false; !weigh(logit, upper, lower, p, weights) && !raised; raised = true)
      raise(logit, upper, lower);
#pragma unroll
    for (int e = 0; e < kHeadGroups; ++e) {
      sum_[e] += p[e][0] + p[e][1];
      top_[e] = fmaxf(top_[e], fmaxf(logit[e][0], logit[e][1]));
      if constexpr (!Format::kFloating)
#pragma unroll
        for (int b = 0; b < kBlocks; ++b)
          minima_[e][b] =
              fmaf(p[e][0], upper.minimum(b), fmaf(p[e][1], lower.minimum(b), minima_[e][b]));
#pragma unroll
      for (auto& two : weights[e])
#pragma unroll
        for (std::uint32_t& one : two) one = transpose_matrix(one);  // from result to operand B
    }
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      std::uint32_t pairs[2][4];
      unpack_values<Format, kBlocks>(words, b, pairs);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const std::uint32_t a[4] = {pairs[0][2 * n], pairs[0][2 * n + 1], pairs[1][2 * n],
                                    pairs[1][2 * n + 1]};
#pragma unroll
        for (int e = 0; e < kHeadGroups; ++e)
          multiply_add<__half>(out_[e][2 * b + n], a, weights[e][b / 2][0], weights[e][b / 2][1]);
      }
    }
  }

  /// Writes the warp's part, relative to the largest logit.
  __device__ void finish(const WarpPart& part) {
    const auto reduce_lanes = [](float own, auto both) {
#pragma unroll
      for (int lanes = 4; lanes < kWarpSize; lanes *= 2)
        own = both(own, __shfl_xor_sync(~0u, own, lanes));
      return own;
    };
    const auto plus = [](float a, float b) { return a + b; };
#pragma unroll
    for (int e = 0; e < kHeadGroups; ++e) {
      const float top = reduce_lanes(top_[e], [](float a, float b) { return fmaxf(a, b); }),
                  factor = rescale(reference_[e], top), sum = reduce_lanes(sum_[e], plus) * factor;
      if (row() == 0 && head(e) < group_) part.state[head(e)] = make_float2(top, sum);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        const float minimum = reduce_lanes(minima_[e][b], plus);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (const int n = 2 * b + i / 2; head(e) < group_)
            part.out[head(e) * kDim + channel(n, i % 2)] =
                (out_[e][n][i % 2 * 2 + column_of(n)] + minimum) * factor;
      }
    }
    __syncwarp();
    for (int at = lane_id(); at < group_ * kDim; at += kWarpSize)
      part.out[at] = hadamard_rotate_block(part.out[at]) / kQuantBlock;
  }

 private:
  // A lane handles rows row() and row() + 8 of a tile and, in each head group, the head whose index
  // is the lane's index modulo four. It holds the output of that head in the channels channel(n,
  // half).
  __device__ static int row() { return lane_id() / 4; }
  __device__ static int head(int e) { return 4 * e + lane_id() % 4; }
  __device__ static int channel(int n, int half) {
    return n / 2 * kWarpSize + row() * 4 + n % 2 * 2 + half;
  }
  /// Which of a head's two columns holds the weights times the scale of the block of step n, which
  /// is block n / 2. Blocks are weighed in pairs: the even block of a pair in the first column, the
  /// odd block in the second.
  __device__ static constexpr int column_of(int n) { return n / 2 % 2; }

  /// Channels `from` and from + 2 of a query, for this lane's column. The first column of a head
  /// gets the numbers rounded to fp16, the second column their rounding errors.
  __device__ static std::uint32_t halves_of(const float* from) {
    const std::uint32_t both = pack<__half>(from[0], from[2]);
    const float2 kept = unpack<__half>(both);
    return row() % 2 == 0 ? both : pack<__half>(from[0] - kept.x, from[2] - kept.y);
  }
  /// Channels `from`, from + 2, from + 4 and from + 6 of a query, for this lane's column. The first
  /// column of a head gets the upper digits, the second column the lower digits.
  __device__ static std::uint32_t digits_of(const float* from, float per_unit) {
    std::uint32_t digits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int number = __float2int_rn(from[2 * i] * per_unit), upper = (number + 128) >> 8,
                digit = row() % 2 == 0 ? upper : number - upper * 256;
      digits |= (static_cast<std::uint32_t>(digit) & 0xffu) << 8 * i;
    }
    return digits;
  }

  /// Computes the base-2 logits of rows row() and row() + 8.
  template <class Format>
  __device__ void score(const unsigned char* keys, float (&logit)[kHeadGroups][2]) const {
    constexpr int kBits = Format::kKeyBits;
    const unsigned char* const metadata = keys + kRows * kDim * kBits / 8;
    std::uint32_t words[lane_words(kBits, kBlocks)];
    load_lane_words(keys, words);
    const RowMetadata<kBlocks, Format::kFloating> upper(metadata, row()),
        lower(metadata, row() + 8);
    float minima[kHeadGroups][2] = {};
#pragma unroll
    for (auto& two : logit) two[0] = two[1] = 0;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      std::uint32_t a[4];
      unpack_keys<kBits, kBlocks>(words, b, a);
#pragma unroll
      for (int e = 0; e < kHeadGroups; ++e) {
        float products[2];
        if constexpr (Format::kFloating)
          multiply_halves(a, query_of_[e][b], products);
        else
          multiply_digits(a, query_of_[e][b], products);
        logit[e][0] = fmaf(upper.scale(b), products[0], logit[e][0]);
        logit[e][1] = fmaf(lower.scale(b), products[1], logit[e][1]);
        minima[e][0] = fmaf(upper.minimum(b), firsts_[e][b], minima[e][0]);
        minima[e][1] = fmaf(lower.minimum(b), firsts_[e][b], minima[e][1]);
      }
    }
#pragma unroll
    for (int e = 0; e < kHeadGroups; ++e)
#pragma unroll
      for (int i = 0; i < 2; ++i) logit[e][i] = fmaf(logit[e][i], scale_[e], minima[e][i]);
  }
  /// multiply_digits() and multiply_halves(): the products of one block of the keys with the query
  /// of head(e), for rows row() and row() + 8. Both add up a head's two columns.
  __device__ static void multiply_digits(const std::uint32_t (&a)[4], const std::uint32_t (&q)[4],
                                         float (&products)[2]) {
    int sums[4] = {};
    multiply_add_bytes(sums, a, q[0], q[1]);
    products[0] = static_cast<float>(sums[0] * 256 + sums[1]);
    products[1] = static_cast<float>(sums[2] * 256 + sums[3]);
  }
  __device__ static void multiply_halves(const std::uint32_t (&bytes)[4],
                                         const std::uint32_t (&q)[4], float (&products)[2]) {
    float sums[4] = {};
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const std::uint32_t a[4] = {halves_of_e4m3(bytes[2 * k]), halves_of_e4m3(bytes[2 * k + 1]),
                                  halves_of_e4m3(bytes[2 * k] >> 16),
                                  halves_of_e4m3(bytes[2 * k + 1] >> 16)};
      multiply_add<__half>(sums, a, q[2 * k], q[2 * k + 1]);
    }
    products[0] = sums[0] + sums[1];
    products[1] = sums[2] + sums[3];
  }

  /// Computes the weights `p` of the lane's rows, and `weights`: the products of p with the scales
  /// of the blocks, in fp16, two blocks to a word. Returns false if a product is 2^15 or more, if a
  /// weight is too large for the sum of weights, or if no reference was set yet. The caller then
  /// calls raise() and tries again.
  template <bool kFloating>
  __device__ bool weigh(const float (&logit)[kHeadGroups][2],
                        const RowMetadata<kBlocks, kFloating>& upper,
                        const RowMetadata<kBlocks, kFloating>& lower, float (&p)[kHeadGroups][2],
                        std::uint32_t (&weights)[kHeadGroups][(kBlocks + 1) / 2][2]) const {
    constexpr std::uint32_t kTooLarge = 0x7800;  // 2^15
    // If all values of a row are zero, so are its scales in fp8 (but not in integer formats). Its
    // products are then 0 for a weight of any size. After raise(), weights are at most 2^53.
    constexpr float kLargestWeight = 0x1p60f;
    __half2 max_value = __float2half2_rn(0);
    float max_weight = 0;
#pragma unroll
    for (int e = 0; e < kHeadGroups; ++e) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        p[e][i] = exp2_fast(logit[e][i] - reference_[e]);
        if constexpr (kFloating) max_weight = fmaxf(max_weight, p[e][i]);
      }
#pragma unroll
      for (int b = 0; b < kBlocks; b += 2)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const auto weight = [&](int at) {
            return at < kBlocks ? p[e][i] * (i == 0 ? upper : lower).scale(at) : 0.0f;
          };
          std::uint32_t& both = weights[e][b / 2][i];
          both = pack<__half>(weight(b), weight(b + 1));
          max_value = __hmax2(max_value, reinterpret_cast<const __half2&>(both));
        }
    }
    // Two fp16 numbers, neither of them negative. 0x7800 masks the upper four bits of an exponent.
    // Adding 0x0800 carries into the sign bit if all four are set, so for 2^15 and more, infinity
    // and NaN.
    const auto bits = reinterpret_cast<const std::uint32_t&>(max_value);
    const bool too_large = ((bits & kTooLarge * 0x10001u) + 0x08000800u & 0x80008000u) != 0 ||
                           max_weight > kLargestWeight || fresh_;
    return !__any_sync(~0u, too_large);
  }
  /// Raises the references so that the products of this tile fit in fp16, and rescales the sums and
  /// outputs. The first tile sets the references, which may be lower than those of the exact tiers,
  /// so that its products are not too small for fp16. But they are not lower by more than kMaxGap,
  /// because the exact tiers' sums would overflow. Products that this makes too small are less than
  /// 2^-85 of the exact tiers' weights.
  template <class Metadata>
  __device__ void raise(const float (&logit)[kHeadGroups][2], const Metadata& upper,
                        const Metadata& lower) {
    constexpr float kHeadroom = 13, kMinExponent = -40, kMaxGap = 100;
    const auto exponent = [](const Metadata& row) {
      float max_value = 0;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) max_value = fmaxf(max_value, row.scale(b));
      return fmaxf(log2f(max_value), kMinExponent);
    };
    const float upper_exponent = exponent(upper), lower_exponent = exponent(lower);
#pragma unroll
    for (int e = 0; e < kHeadGroups; ++e) {
      float next = fmaxf(logit[e][0] + upper_exponent, logit[e][1] + lower_exponent);
#pragma unroll
      for (int lanes = 4; lanes < kWarpSize; lanes *= 2)
        next = fmaxf(next, __shfl_xor_sync(~0u, next, lanes));
      next -= kHeadroom;
      next = fmaxf(next, fresh_ ? reference_[e] - kMaxGap : reference_[e]);
      const float factor = rescale(reference_[e], next);
      reference_[e] = next;
      sum_[e] *= factor;
#pragma unroll
      for (float& minimum : minima_[e]) minimum *= factor;
#pragma unroll
      for (auto& step : out_[e])
#pragma unroll
        for (float& out : step) out *= factor;
    }
    fresh_ = false;
  }

  const HadamardQuery& query_;
  int group_;
  float base2_scale_;
  bool fresh_ = true;  ///< no quantized tile has set the references yet
  // for this lane's column, from begin(): digits of the queries or, for fp8, halves_of() them
  std::uint32_t query_of_[kHeadGroups][kBlocks][4];
  // for head(e), from begin(). scale_: factor from products to base-2 logits. firsts_:
  // HadamardQuery::firsts times base2_scale_
  float scale_[kHeadGroups], firsts_[kHeadGroups][kBlocks];
  // sums of weights times values, after the Hadamard rotation and without the values' minima
  float out_[kHeadGroups][kDim / 16][4];
  // for head(e). sum_: sum of weights. top_: largest logit. minima_: sums of weights times the
  // values' minima. These three cover only this lane's rows until finish()
  float reference_[kHeadGroups], sum_[kHeadGroups], top_[kHeadGroups],
      minima_[kHeadGroups][kBlocks];
};

}  // namespace kvlab::kernels
