// The text of the row loops. Included by one source file for each instruction set, by the rules of
// traces/base/numeric/vectors.hpp.
#pragma once

#include "policies/observation.hpp"
#include "sim/lanes/loops/row_loops.hpp"
#include "traces/base/numeric/exponential.hpp"
#include "traces/base/numeric/vectors.hpp"

namespace kvlab {
namespace {

constexpr int kHeads = static_cast<int>(kQuad);
constexpr int kTokens = static_cast<int>(kBlockTokens);
constexpr int kQuads = kWidth / kHeads;                // tokens in a register
constexpr int kBlockParts = kTokens / kQuads;          // registers of a block, [16][4]
constexpr int kPieces = kTokens / kWidth;              // registers for one head of a block
constexpr std::size_t kBlockFloats = kTokens * kQuad;  // of a block

// --- a quad's registers ------------------------------------------------------------------------

/// The exponentials of kQuads tokens.
#if defined(__AVX512F__)
inline Floats load_quads(const float* a, const float* b, const float* c, const float* d) {
  const __m512 ab = _mm512_insertf32x4(_mm512_castps128_ps512(_mm_loadu_ps(a)), _mm_loadu_ps(b), 1);
  return _mm512_insertf32x4(_mm512_insertf32x4(ab, _mm_loadu_ps(c), 2), _mm_loadu_ps(d), 3);
}
#elif defined(__AVX2__)
inline Floats load_quads(const float* a, const float* b, const float*, const float*) {
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(a)), _mm_loadu_ps(b), 1);
}
#else
inline Floats load_quads(const float* a, const float*, const float*, const float*) {
  return load(a);
}
#endif

/// The exponentials of tokens[0], …, tokens[kQuads - 1].
inline Floats load_scattered(const float* e, const std::uint32_t* tokens) {
  const auto at = [&](int i) { return e + std::size_t{tokens[i]} * kQuad; };
  if constexpr (kQuads == 4) return load_quads(at(0), at(1), at(2), at(3));
  if constexpr (kQuads == 2) return load_quads(at(0), at(1), nullptr, nullptr);
  return load_quads(at(0), nullptr, nullptr, nullptr);
}

/// Four floats to every kQuads tokens of a register.
inline Floats repeated(const float* four) {
  Floats v;
  for (int i = 0; i < kWidth; ++i) v[i] = four[i % kHeads];
  return v;
}

/// Unpacks pairs within each lane of four: (a0 b0 a1 b1) or, high, (a2 b2 a3 b3).
template <bool High, class V>
inline V unpack(V a, V b) {
  constexpr int o = High ? 2 : 0;
  if constexpr (kWidth == 16)
    return __builtin_shufflevector(a, b, o, o + 16, o + 1, o + 17, o + 4, o + 20, o + 5, o + 21,
                                   o + 8, o + 24, o + 9, o + 25, o + 12, o + 28, o + 13, o + 29);
  else if constexpr (kWidth == 8)
    return __builtin_shufflevector(a, b, o, o + 8, o + 1, o + 9, o + 4, o + 12, o + 5, o + 13);
  else
    return __builtin_shufflevector(a, b, o, o + 4, o + 1, o + 5);
}

/// The same with pairs of two: (a0 a1 b0 b1) or (a2 a3 b2 b3).
template <bool High, class V>
inline V unpack_pairs(V a, V b) {
  constexpr int o = High ? 2 : 0;
  if constexpr (kWidth == 16)
    return __builtin_shufflevector(a, b, o, o + 1, o + 16, o + 17, o + 4, o + 5, o + 20, o + 21,
                                   o + 8, o + 9, o + 24, o + 25, o + 12, o + 13, o + 28, o + 29);
  else if constexpr (kWidth == 8)
    return __builtin_shufflevector(a, b, o, o + 1, o + 8, o + 9, o + 4, o + 5, o + 12, o + 13);
  else
    return __builtin_shufflevector(a, b, o, o + 1, o + 4, o + 5);
}

/// Element j of lane k goes to kQuads j + k: the tokens of four registers [token][4], turned, come
/// into their order.
template <class V>
inline V in_order(V v) {
  if constexpr (kWidth == 16)
    return __builtin_shufflevector(v, v, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  else if constexpr (kWidth == 8)
    return __builtin_shufflevector(v, v, 0, 4, 1, 5, 2, 6, 3, 7);
  else
    return v;
}
/// The other way round.
template <class V>
inline V out_of_order(V v) {
  if constexpr (kWidth == 8)
    return __builtin_shufflevector(v, v, 0, 2, 4, 6, 1, 3, 5, 7);
  else
    return in_order(v);
}

/// Within each lane of four: element j of register i and element i of register j change places.
inline void transpose(Floats* r) {
  const Floats a = unpack<false>(r[0], r[2]), b = unpack<false>(r[1], r[3]);
  const Floats c = unpack<true>(r[0], r[2]), d = unpack<true>(r[1], r[3]);
  r[0] = unpack<false>(a, b);
  r[1] = unpack<true>(a, b);
  r[2] = unpack<false>(c, d);
  r[3] = unpack<true>(c, d);
}

inline Floats greater(Floats a, Floats b) { return a > b ? a : b; }

inline float largest_of(Floats v) {
  float most = v[0];
  for (int i = 1; i < kWidth; ++i) most = v[i] > most ? v[i] : most;
  return most;
}

// --- gathering -----------------------------------------------------------------------------------

/// Four heads of one token in a register of four, whatever the set.
typedef float Four __attribute__((vector_size(16)));
typedef std::int32_t FourInts __attribute__((vector_size(16)));

typedef double FourDoubles __attribute__((vector_size(32)));

inline FourDoubles load_doubles(const double* from) {
  FourDoubles v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

inline Four load_four(const float* from) {
  Four v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

/// Joins registers [token][4] by halves of their tokens.
template <class Join>
inline __attribute__((always_inline)) Four by_halves(Floats* parts, int count, Join join) {
  for (int width = count / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) parts[i] = join(parts[i], parts[i + width]);
  Four quads[kQuads];
  std::memcpy(quads, parts, sizeof quads);
  for (int width = kQuads / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) quads[i] = join(quads[i], quads[i + width]);
  return quads[0];
}

/// Adds a block's lanes by halves: a sum for each head.
inline void store_sums(const Floats* lanes, float* sum) {
  Floats parts[kBlockParts];
  std::memcpy(parts, lanes, sizeof parts);
  const Four all = by_halves(parts, kBlockParts, [](auto a, auto b) { return a + b; });
  std::memcpy(sum, &all, sizeof all);
}

/// Lane sums of a quad: those of sixteen tokens side by side, [16][4].
struct QuadSums {
  static constexpr int kMosts = kBlockParts < 4 ? kBlockParts : 4;
  Floats sum[kBlockParts], most[kMosts];

  inline __attribute__((always_inline)) QuadSums() {
    for (Floats& part : sum) part = Floats{};
    for (Floats& part : most) part = Floats{};
  }
  /// From lanes [16][4], by token modulo 16.
  inline __attribute__((always_inline)) QuadSums(const float* lanes, const float* largest) {
    for (int i = 0; i < kBlockParts; ++i) sum[i] = load(lanes + i * kWidth);
    for (int i = 0; i < kMosts; ++i) most[i] = load(largest + i * kWidth);
  }
  inline __attribute__((always_inline)) void add(int part, Floats e) {
    sum[part] += e;
    most[part % kMosts] = greater(e, most[part % kMosts]);
  }
  inline __attribute__((always_inline)) void add_block(const float* block) {
    for (int i = 0; i < kBlockParts; ++i) add(i, load(block + i * kWidth));
  }
  inline __attribute__((always_inline)) void store_to(float* lanes, float* largest) const {
    for (int i = 0; i < kBlockParts; ++i) store(lanes + i * kWidth, sum[i]);
    for (int i = 0; i < kMosts; ++i) store(largest + i * kWidth, most[i]);
  }
  bool any_at_least(float bound) const;
  /// Adds the lanes by halves.
  void finish(float* to_sum, float* to_most) const {
    store_sums(sum, to_sum);
    Floats mosts[kMosts];
    std::memcpy(mosts, most, sizeof mosts);
    const Four largest = by_halves(mosts, kMosts, [](auto a, auto b) { return a > b ? a : b; });
    std::memcpy(to_most, &largest, sizeof largest);
  }
};

/// Zeros from token `count` to the end of its block.
inline void pad(float* rows, std::size_t count) {
  const std::size_t rest = (kBlockTokens - count % kBlockTokens) % kBlockTokens;
  std::memset(rows + count * kQuad, 0, rest * kQuad * sizeof(float));
}

/// Copies tokens to whole blocks, padded, and into their sums.
inline void copy_blocks(const float* e, std::size_t count, float* to, QuadSums& sums) {
  std::size_t i = 0;
  for (; i + kBlockTokens <= count; i += kBlockTokens)
    for (int part = 0; part < kBlockParts; ++part) {
      const Floats x = load(e + i * kQuad + part * kWidth);
      store(to + i * kQuad + part * kWidth, x);
      sums.add(part, x);
    }
  if (i == count) return;
  if (i < count) std::memcpy(to + i * kQuad, e + i * kQuad, (count - i) * kQuad * sizeof(float));
  pad(to, count);
  sums.add_block(to + i * kQuad);
}

/// Whether the sixteen tokens from tokens[0] on follow one another.
inline bool follow(const std::uint32_t* tokens) {
  return tokens[kBlockTokens - 1] - tokens[0] == kBlockTokens - 1;
}

/// Part of a block's exponentials; `run`: its tokens follow one another.
inline __attribute__((always_inline)) Floats load_part(const float* e, const std::uint32_t* tokens,
                                                       bool run, int part) {
  return run ? load(e + std::size_t{tokens[0]} * kQuad + part * kWidth)
             : load_scattered(e, tokens + part * kQuads);
}

/// Copies fewer tokens than a block, padded.
inline void copy_rest(const float* e, const std::uint32_t* tokens, std::size_t count, float* kept) {
  for (std::size_t j = 0; j < count; ++j)
    std::memcpy(kept + j * kQuad, e + std::size_t{tokens[j]} * kQuad, kQuad * sizeof(float));
  pad(kept, count);
}

void gather(const float* e, const std::uint32_t* tokens, std::size_t count, float* kept, float* sum,
            float* most) {
  QuadSums all;
  std::size_t i = 0;
  for (; i + kBlockTokens <= count; i += kBlockTokens) {
    const bool run = follow(tokens + i);
    for (int part = 0; part < kBlockParts; ++part) {
      const Floats x = load_part(e, tokens + i, run, part);
      store(kept + i * kQuad + part * kWidth, x);
      all.add(part, x);
    }
  }
  if (i < count) {
    copy_rest(e, tokens + i, count - i, kept + i * kQuad);
    all.add_block(kept + i * kQuad);
  }
  all.finish(sum, most);
}

void gather_around(const float* e, const std::uint32_t* tokens, std::size_t begin, std::size_t end,
                   std::size_t count, float* kept, float* sum) {
  Floats sums[kBlockParts] = {};
  for (std::size_t i = 0; i < begin; i += kBlockTokens) {
    const bool run = follow(tokens + i);
    for (int part = 0; part < kBlockParts; ++part) {
      const Floats x = load_part(e, tokens + i, run, part);
      store(kept + i * kQuad + part * kWidth, x);
      sums[part] += x;
    }
  }
  for (std::size_t i = begin; i < end; i += kBlockTokens)
    for (int part = 0; part < kBlockParts; ++part)
      sums[part] += load_part(e, tokens + i, true, part);
  if (end < count) {
    copy_rest(e, tokens + end, count - end, kept + begin * kQuad);
    for (int part = 0; part < kBlockParts; ++part)
      sums[part] += load(kept + begin * kQuad + part * kWidth);
  }
  store_sums(sums, sum);
}

void sum_alone(const float* e, const std::uint32_t* tokens, std::size_t count, float* sum,
               float* most) {
  QuadSums all;
  std::size_t i = 0;
  for (; i + kBlockTokens <= count; i += kBlockTokens) {
    const bool run = follow(tokens + i);
    for (int part = 0; part < kBlockParts; ++part)
      all.add(part, load_part(e, tokens + i, run, part));
  }
  all.finish(sum, most);
  Four total = load_four(sum), largest = load_four(most);
  for (; i < count; ++i) {
    const Four one = load_four(e + std::size_t{tokens[i]} * kQuad);
    total += one;
    largest = one > largest ? one : largest;
  }
  std::memcpy(sum, &total, sizeof total);
  std::memcpy(most, &largest, sizeof largest);
}

inline FourInts over_tokens(Ints v) {
  FourInts parts[kQuads];
  std::memcpy(parts, &v, sizeof v);
  for (int i = 1; i < kQuads; ++i) parts[0] += parts[i];
  return parts[0];
}

/// Whole blocks' sums and hits; tokens that follow one another are read as such. Returns how many
/// tokens that are.
inline std::size_t total_blocks(const float* e, const std::uint32_t* tokens, std::size_t count,
                                const float* least, Four& sum, FourInts& hits) {
  if (count < kBlockTokens) return 0;
  const Floats bound = repeated(least);
  Floats sums[kBlockParts] = {};
  Ints asked[2] = {};
  std::size_t i = 0;
  for (; i + kBlockTokens <= count; i += kBlockTokens) {
    const bool run = !tokens || tokens[i + kBlockTokens - 1] - tokens[i] == kBlockTokens - 1;
    const float* const from = e + (tokens ? std::size_t{tokens[i]} : i) * kQuad;
    for (int part = 0; part < kBlockParts; ++part) {
      const Floats x =
          run ? load(from + part * kWidth) : load_scattered(e, tokens + i + part * kQuads);
      sums[part] += x;
      asked[part % 2] -= x >= bound;
    }
  }
  sum = by_halves(sums, kBlockParts, [](auto a, auto b) { return a + b; });
  hits = over_tokens(asked[0] + asked[1]);
  return i;
}

void total(const float* e, const std::uint32_t* tokens, std::size_t count, const float* least,
           float* sum, std::uint32_t* hits) {
  Four all = {};
  FourInts asked = {};
  std::size_t i = total_blocks(e, tokens, count, least, all, asked);
  const Four bound = load_four(least);
  for (; i < count; ++i) {
    const Four one = load_four(e + std::size_t{tokens ? tokens[i] : i} * kQuad);
    all += one;
    asked -= one >= bound;
  }
  for (int h = 0; h < kHeads; ++h) {
    sum[h] = all[h];
    hits[h] += static_cast<std::uint32_t>(asked[h]);
  }
}

/// Fewer than kQuads tokens, and zeros.
inline __attribute__((always_inline)) Floats load_few(const float* e, const std::uint32_t* tokens,
                                                      std::size_t count) {
  static constexpr float kNothing[kQuad] = {};
  const auto at = [&](std::size_t i) {
    return i < count ? e + std::size_t{tokens[i]} * kQuad : kNothing;
  };
  if constexpr (kQuads == 4) return load_quads(at(0), at(1), at(2), kNothing);
  return load_quads(at(0), kNothing, nullptr, nullptr);
}

/// Sixteen running sums of a list's tokens, added by halves, and their hits. (Parts by constants:
/// else they would not stay in registers.)
inline __attribute__((always_inline)) Four list_totals(const float* e, const std::uint32_t* tokens,
                                                       std::size_t count, Floats bound,
                                                       FourInts& hits) {
  Floats sums[kBlockParts] = {};
  Ints asked[2] = {};
  const auto add = [&](int part, Floats x) {
    sums[part] += x;
    asked[part % 2] -= x >= bound;
  };
  std::size_t i = 0;
  for (; i + kBlockTokens <= count; i += kBlockTokens) {
    const bool run = follow(tokens + i);
#pragma GCC unroll 16
    for (int part = 0; part < kBlockParts; ++part) add(part, load_part(e, tokens + i, run, part));
  }
#pragma GCC unroll 16
  for (int part = 0; part < kBlockParts; ++part) {
    const std::size_t at = i + static_cast<std::size_t>(part * kQuads);
    if (at + kQuads <= count)
      add(part, load_scattered(e, tokens + at));
    else if (at < count)
      add(part, load_few(e, tokens + at, count - at));
  }
  hits = over_tokens(asked[0] + asked[1]);
  return by_halves(sums, kBlockParts, [](auto a, auto b) { return a + b; });
}

void run_totals(const float* e, const std::uint32_t* tokens, const std::size_t* begins,
                std::size_t lists, std::size_t unseen, const float* least, std::size_t stride,
                double* sums, std::uint32_t* hits) {
  const Floats bound = repeated(least);
  const FourInts zero_asks = load_four(least) <= Four{};  // then padding asks, too: -1
  FourDoubles sum = {};
  FourInts asked = {};
  for (std::size_t l = 0; l < lists; ++l) {
    const std::size_t count = begins[l + 1] - begins[l] - (l == 0 ? unseen : 0);
    if (count > 0) {
      FourInts own;
      sum += __builtin_convertvector(list_totals(e, tokens + begins[l], count, bound, own),
                                     FourDoubles);
      const auto padding = static_cast<std::int32_t>((kQuads - count % kQuads) % kQuads);
      asked += own + zero_asks * padding;
    }
    std::memcpy(sums + l * stride, &sum, sizeof sum);
    std::memcpy(hits + l * stride, &asked, sizeof asked);
  }
}

// --- masses --------------------------------------------------------------------------------------

/// Divides a quad's tokens by one sum a head, rounded correctly, without a division for each
/// element where the machine fuses: a faithful first quotient from the reciprocal in two parts,
/// then one exact remainder (Markstein 1990, theorem 8.2). Sums are scaled by 2^-32, so quotients
/// are p * 2^32.
struct Divisor {
  Floats sum, high, low;

  explicit Divisor(const float* whole) {
    float parts[3][kQuad];
    for (std::size_t h = 0; h < kQuad; ++h) {
      const float scaled = whole[h] > 0 ? whole[h] * 0x1p-32f : 1.0f, inverse = 1.0f / scaled;
      parts[0][h] = scaled;
      parts[1][h] = inverse;
      parts[2][h] = whole[h] > 0 ? fused_float(-scaled, inverse, 1.0f) * inverse : 0.0f;
    }
    sum = repeated(parts[0]);
    high = repeated(parts[1]);
    low = repeated(parts[2]);
  }
  inline __attribute__((always_inline)) Floats divide(Floats e) const {
    if constexpr (!kHasFused) return e / sum;
    const Floats first = fused(e, high, e * low);
    return fused(fused(-first, sum, e), high, first);
  }
};

/// To the nearest integer, ties to even; |x| < 2^30.
inline Ints nearest(Floats x) {
#if defined(__AVX512F__)
  return reinterpret_cast<Ints>(_mm512_cvtps_epi32(x));
#elif defined(__AVX2__)
  return reinterpret_cast<Ints>(_mm256_cvtps_epi32(x));
#elif defined(__SSE2__)
  return reinterpret_cast<Ints>(_mm_cvtps_epi32(x));
#elif defined(__aarch64__)
  return vcvtnq_s32_f32(x);
#else
  Ints v;
  for (int i = 0; i < kWidth; ++i) v[i] = static_cast<std::int32_t>(__builtin_lrintf(x[i]));
  return v;
#endif
}

inline bool any_at_least(Floats v, float bound) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(v, _mm512_set1_ps(bound), _CMP_GE_OQ) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps(_mm256_cmp_ps(v, _mm256_set1_ps(bound), _CMP_GE_OQ)) != 0;
#else
  bool any = false;
  for (int i = 0; i < kWidth; ++i) any |= v[i] >= bound;
  return any;
#endif
}

bool QuadSums::any_at_least(float bound) const {
  Floats all = most[0];
  for (int i = 1; i < kMosts; ++i) all = greater(most[i], all);
  return kvlab::any_at_least(all, bound);
}

/// The sums over heads of four registers [token][4], by token.
template <class V>
inline V over_heads(const V* r) {
  const V ab = unpack<false>(r[0], r[1]) + unpack<true>(r[0], r[1]);
  const V cd = unpack<false>(r[2], r[3]) + unpack<true>(r[2], r[3]);
  return in_order(unpack_pairs<false>(ab, cd) + unpack_pairs<true>(ab, cd));
}

/// Adds a register of 32-bit counts to 64-bit masses.
inline __attribute__((always_inline)) void add_counts(Words counts, bool first,
                                                      std::uint64_t* mass) {
#if defined(__AVX512F__)
  const __m512i all = reinterpret_cast<__m512i>(counts);
  const __m512i low = _mm512_cvtepu32_epi64(_mm512_castsi512_si256(all));
  const __m512i high = _mm512_cvtepu32_epi64(_mm512_extracti64x4_epi64(all, 1));
  const __m512i old_low = first ? _mm512_setzero_si512() : _mm512_loadu_si512(mass);
  const __m512i old_high = first ? _mm512_setzero_si512() : _mm512_loadu_si512(mass + 8);
  _mm512_storeu_si512(mass, _mm512_add_epi64(old_low, low));
  _mm512_storeu_si512(mass + 8, _mm512_add_epi64(old_high, high));
#else
  std::uint32_t narrow[kWidth];
  std::memcpy(narrow, &counts, sizeof narrow);
  for (int i = 0; i < kWidth; ++i) mass[i] = (first ? 0 : mass[i]) + narrow[i];
#endif
}

constexpr float kMostCounted = 0x1p30f;  // four that are less fit an unsigned count

/// Takes what is too large for the counts out of registers [token][4] and adds it to the masses by
/// itself: such floats are whole numbers.
inline __attribute__((noinline)) void add_large(Floats* scaled, std::uint64_t* mass) {
  for (int r = 0; r < kHeads; ++r) {
    if (!any_at_least(scaled[r], kMostCounted)) continue;
    for (int i = 0; i < kWidth; ++i) {
      if (scaled[r][i] < kMostCounted) continue;
      mass[r * kQuads + i / kHeads] += static_cast<std::uint64_t>(scaled[r][i]);
      scaled[r][i] = 0;
    }
  }
}

void masses(const float* kept, std::size_t count, const float* sum, bool first,
            std::uint64_t* mass) {
  const Divisor divisor(sum);
  const std::size_t padded = whole_blocks(count);
  for (std::size_t i = 0; i < padded; i += kWidth, kept += kWidth * kQuad) {
    Floats scaled[kHeads];
    for (int r = 0; r < kHeads; ++r) scaled[r] = divisor.divide(load(kept + r * kWidth));
    const Floats most = greater(greater(scaled[0], scaled[1]), greater(scaled[2], scaled[3]));
    bool fresh = first;
    if (__builtin_expect(any_at_least(most, kMostCounted), 0)) {
      if (first) std::memset(mass + i, 0, kWidth * sizeof(std::uint64_t));
      fresh = false;
      Floats large[kHeads];  // a copy: only what is called here needs it in memory
      for (int r = 0; r < kHeads; ++r) large[r] = scaled[r];
      add_large(large, mass + i);
      for (int r = 0; r < kHeads; ++r) scaled[r] = large[r];
    }
    Words counts[kHeads];
    for (int r = 0; r < kHeads; ++r) counts[r] = reinterpret_cast<Words>(nearest(scaled[r]));
    add_counts(over_heads(counts), fresh, mass + i);
  }
}

// --- requests ------------------------------------------------------------------------------------

inline Ints load_ints(const std::uint32_t* from) {
  Ints v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

void mark(const float* kept, std::size_t count, const float* least, bool first,
          std::uint32_t* asked) {
  const Floats bound = repeated(least);
  const std::size_t padded = whole_blocks(count);
  for (std::size_t i = 0; i < padded; i += kWidth, kept += kWidth * kQuad) {
    Ints wants[kHeads];
    for (int r = 0; r < kHeads; ++r) wants[r] = load(kept + r * kWidth) >= bound;
    Ints flags = (over_heads(wants) != 0) & 1;
    if (!first) flags |= load_ints(asked + i);
    std::memcpy(asked + i, &flags, sizeof flags);
  }
}

/// Bit i: element i of `v` is at least that of `bound`.
inline std::uint64_t mask_of(Floats v, Floats bound) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(v, bound, _CMP_GE_OQ);
#elif defined(__AVX2__)
  return static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(v, bound, _CMP_GE_OQ)));
#else
  std::uint64_t bits = 0;
  for (int i = 0; i < kWidth; ++i) bits |= std::uint64_t{v[i] >= bound[i]} << i;
  return bits;
#endif
}

/// The lowest `count` bits, or all of a word.
inline std::uint64_t first_bits(std::size_t count) {
  return count < 64 ? (std::uint64_t{1} << count) - 1 : ~std::uint64_t{0};
}

/// Which heads have some -1 among registers [token][4].
inline std::uint32_t heads_in(Ints v) {
  std::uint32_t heads = 0;
  for (int i = 0; i < kWidth; ++i) heads |= v[i] ? 1u << i % kHeads : 0u;
  return heads;
}

std::uint32_t flag(const float* e, std::size_t count, const float* least, const float* low,
                   const float* high, std::uint64_t* bits, std::size_t words) {
  const Floats from = repeated(low), to = repeated(high);
  Ints between = {};
  for (std::size_t w = 0; w * 64 < count; ++w) {
    std::uint64_t all[kQuad] = {};
    for (std::size_t i = 0; i < 64 && w * 64 + i < count; i += kWidth) {
      Floats r[kHeads];
      for (int j = 0; j < kHeads; ++j) {
        r[j] = load(e + (w * 64 + i) * kQuad + j * kWidth);
        between |= (r[j] >= from) & (r[j] < to);
      }
      transpose(r);
      for (int h = 0; h < kHeads; ++h) all[h] |= mask_of(in_order(r[h]), Floats{} + least[h]) << i;
    }
    const std::uint64_t seen = first_bits(count - w * 64);
    for (std::size_t h = 0; h < kQuad; ++h) bits[h * words + w] = all[h] & seen;
  }
  return heads_in(between);
}

/// Bit i: token i of a block has e[head] >= least; the registers are [token][4].
inline std::uint64_t block_bits(const float* e, std::size_t head, Floats least) {
#if defined(__BMI2__)
  std::uint64_t all = 0;
  for (int part = 0; part < kBlockParts; ++part)
    all |= mask_of(load(e + part * kWidth), least) << part * kWidth;
  return _pext_u64(all, std::uint64_t{0x1111111111111111} << head);
#else
  std::uint64_t bits = 0;
  for (std::size_t i = 0; i < kBlockTokens; ++i)
    bits |= std::uint64_t{e[i * kQuad + head] >= least[0]} << i;
  return bits;
#endif
}

bool flag_head(const float* e, std::size_t count, std::size_t head, float least, float high,
               std::uint64_t* bits) {
  const Floats from = Floats{} + least, to = Floats{} + high;
  std::uint64_t between = 0;
  for (std::size_t w = 0; w * 64 < count; ++w) {
    const std::uint64_t seen = first_bits(count - w * 64);
    std::uint64_t all = 0, large = 0;
    for (std::size_t i = 0; i < 64 && w * 64 + i < count; i += kBlockTokens) {
      const float* const block = e + (w * 64 + i) * kQuad;
      all |= block_bits(block, head, from) << i;
      large |= block_bits(block, head, to) << i;
    }
    bits[w] = all & seen;
    between |= (all & ~large) & seen;
  }
  return between != 0;
}

/// The bits of `bits` where `live` is set, side by side.
inline std::uint64_t extract_bits(std::uint64_t bits, std::uint64_t live) {
#if defined(__BMI2__)
  return _pext_u64(bits, live);
#else
  std::uint64_t found = 0;
  for (std::uint64_t bit = 1; live; live &= live - 1, bit <<= 1)
    if (bits & live & (~live + 1)) found |= bit;
  return found;
#endif
}

/// Element l: bit l.
inline Words flags_of(std::uint64_t bits) {
#if defined(__AVX512F__)
  return reinterpret_cast<Words>(_mm512_maskz_set1_epi32(static_cast<__mmask16>(bits), 1));
#else
  Words places;
  for (int l = 0; l < kWidth; ++l) places[l] = static_cast<std::uint32_t>(l);
  return (Words{} + static_cast<std::uint32_t>(bits)) >> places & 1;
#endif
}

void spread(const std::uint64_t* bits, const std::uint64_t* live, std::size_t words,
            std::uint32_t* to) {
  for (std::size_t w = 0; w < words; ++w) {
    const std::uint64_t own = extract_bits(bits[w], live[w]);
    for (std::size_t i = 0; i < 64; i += kWidth) {  // no branch on how many there are
      const Words flags = flags_of(own >> i);
      std::memcpy(to + i, &flags, sizeof flags);
    }
    to += __builtin_popcountll(live[w]);
  }
}

void bin(const float* e, std::size_t count, const std::uint32_t* most, const std::uint32_t* shift,
         std::uint32_t last_bin, std::uint32_t* bits, std::uint16_t* bins, std::size_t stride) {
  for (std::size_t i = 0; i < count; i += kWidth) {
    Floats r[kHeads];
    for (int j = 0; j < kHeads; ++j) r[j] = load(e + i * kQuad + j * kWidth);
    transpose(r);
    Words rest;
    for (int l = 0; l < kWidth; ++l)
      rest[l] = last_bin + (static_cast<std::uint32_t>(i) + static_cast<std::uint32_t>(l)) %
                               static_cast<std::uint32_t>(kRestBins);
    for (int h = 0; h < kHeads; ++h) {
      const Floats own = in_order(r[h]);
      Words word;
      std::memcpy(&word, &own, sizeof word);
      const Words place = (most[h] - word) >> shift[h];
      const Words binned = place < last_bin ? place : rest;
      const Halves narrow = __builtin_convertvector(binned, Halves);
      const std::size_t at = static_cast<std::size_t>(h) * stride + i;
      std::memcpy(bits + at, &word, sizeof word);
      std::memcpy(bins + at, &narrow, sizeof narrow);
    }
  }
}

std::uint64_t common(const std::uint64_t* a, const std::uint64_t* b, std::size_t words) {
  std::uint64_t count = 0;
  for (std::size_t w = 0; w < words; ++w)
    count += static_cast<std::uint64_t>(__builtin_popcountll(a[w] & b[w]));
  return count;
}

// --- victims -------------------------------------------------------------------------------------

typedef std::uint64_t Longs __attribute__((vector_size(8 * (kWidth / 2))));
constexpr std::size_t kLongs = kWidth / 2;

inline Longs load_longs(const std::uint64_t* from) {
  Longs v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

inline bool any_equal(Longs v, std::uint64_t x) {
#if defined(__AVX512F__)
  return _mm512_cmpeq_epi64_mask(reinterpret_cast<__m512i>(v),
                                 _mm512_set1_epi64(static_cast<std::int64_t>(x))) != 0;
#else
  bool any = false;
  for (std::size_t l = 0; l < kLongs; ++l) any |= v[l] == x;
  return any;
#endif
}

inline Longs lesser(Longs a, Longs b) { return a < b ? a : b; }

std::uint64_t least_of(const std::uint64_t* ranks, std::size_t begin, std::size_t end) {
  std::uint64_t least = ranks[begin];
  if (end - begin < kLongs) {
    for (std::size_t i = begin; i < end; ++i) least = ranks[i] < least ? ranks[i] : least;
    return least;
  }
  Longs best[4];
  for (Longs& one : best) one = load_longs(ranks + end - kLongs);  // the rest, whatever it is
  std::size_t i = begin;
  for (; i + 4 * kLongs <= end; i += 4 * kLongs)
    for (std::size_t s = 0; s < 4; ++s)
      best[s] = lesser(load_longs(ranks + i + s * kLongs), best[s]);
  for (; i + kLongs <= end; i += kLongs) best[0] = lesser(load_longs(ranks + i), best[0]);
  const Longs all = lesser(lesser(best[0], best[1]), lesser(best[2], best[3]));
  for (std::size_t l = 0; l < kLongs; ++l) least = all[l] < least ? all[l] : least;
  return least;
}

#if defined(__AVX512F__)
constexpr std::size_t kFewRanks = 32;

/// The same of kFewRanks at most, in registers.
inline std::size_t first_least_of_few(const std::uint64_t* ranks, std::size_t count) {
  constexpr std::size_t kParts = kFewRanks / kLongs;
  const __m512i none = _mm512_set1_epi64(-1);
  const std::uint64_t there = ~std::uint64_t{0} >> (64 - count);
  __m512i parts[kParts];
  for (std::size_t p = 0; p < kParts; ++p)
    parts[p] = _mm512_mask_loadu_epi64(none, static_cast<__mmask8>(there >> p * kLongs),
                                       ranks + p * kLongs);
  const __m512i best =
      _mm512_min_epu64(_mm512_min_epu64(parts[0], parts[1]), _mm512_min_epu64(parts[2], parts[3]));
  const __m512i least = _mm512_set1_epi64(static_cast<std::int64_t>(_mm512_reduce_min_epu64(best)));
  std::uint64_t found = 0;
  for (std::size_t p = 0; p < kParts; ++p)
    found |= static_cast<std::uint64_t>(_mm512_cmpeq_epi64_mask(parts[p], least)) << p * kLongs;
  return static_cast<std::size_t>(__builtin_ctzll(found & there));
}
#endif

std::size_t first_least(const std::uint64_t* ranks, std::size_t begin, std::size_t end) {
#if defined(__AVX512F__)
  if (end - begin <= kFewRanks) return begin + first_least_of_few(ranks + begin, end - begin);
#endif
  const std::uint64_t least = least_of(ranks, begin, end);
  std::size_t i = begin;
  while (i + kLongs <= end && !any_equal(load_longs(ranks + i), least)) i += kLongs;
  while (ranks[i] != least) ++i;
  return i;
}

// --- figures -------------------------------------------------------------------------------------

void tally(const double* sums, const std::uint32_t* hits, std::size_t sets, std::size_t whole,
           std::size_t stride, const double* inverse, const std::int32_t* due, double least,
           double* recall, double* product, double* missed) {
  const FourDoubles one = FourDoubles{} + 1.0, floor = FourDoubles{} + least,
                    inverses = load_doubles(inverse);
  FourInts dues;
  std::memcpy(&dues, due, sizeof dues);
  const auto add = [&](std::size_t at, FourDoubles kept) {
    FourInts hit;
    std::memcpy(&hit, hits + at, sizeof hit);
    const FourDoubles sum = load_doubles(recall + at) + kept,
                      factor = load_doubles(product + at) * (kept > floor ? kept : floor),
                      misses = load_doubles(missed + at) +
                               __builtin_convertvector(dues - hit, FourDoubles);
    std::memcpy(recall + at, &sum, sizeof sum);
    std::memcpy(product + at, &factor, sizeof factor);
    std::memcpy(missed + at, &misses, sizeof misses);
  };
  for (std::size_t set = 0; set < sets; ++set) {
    const FourDoubles share = load_doubles(sums + set * stride) * inverses;
    add(set * stride, set >= whole ? one : share > one ? one : share);
  }
}

// --- outputs -------------------------------------------------------------------------------------

void list_weights(const float* e, const std::uint32_t* tokens, std::size_t count,
                  const std::uint64_t* bits, float* to, float* size) {
  Four all = load_four(size);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t token = tokens[i];
    const float sign = bits[token / 64] >> token % 64 & 1 ? 1.0f : -1.0f;
    const Four one = load_four(e + std::size_t{token} * kQuad), weight = one * sign;
    std::memcpy(to + i * kQuad, &weight, sizeof weight);
    all += one;
  }
  std::memcpy(size, &all, sizeof all);
}

/// P registers of H heads' sums, over tokens [begin, end).
template <int H, int P>
inline void accumulate_columns(const float* weights, const std::uint32_t* tokens, std::size_t begin,
                               std::size_t end, const float* v, std::size_t stride,
                               std::size_t depth, float* y) {
  Floats sum[H][P];
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h)
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) sum[h][p] = load(y + h * depth + p * kWidth);
  for (std::size_t i = begin; i < end; ++i) {
    const float* row = v + (tokens ? tokens[i] : i) * stride;
    Floats column[P];
    for (int p = 0; p < P; ++p) column[p] = load(row + p * kWidth);
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
      const Floats factor =
          weights[i * kQuad + static_cast<std::size_t>(h)] - Floats{};  // for -0 too
      for (int p = 0; p < P; ++p) sum[h][p] = fused(factor, column[p], sum[h][p]);
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h)
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) store(y + h * depth + p * kWidth, sum[h][p]);
}

/// Some tokens, few enough that their values stay in cache for all columns.
template <int H>
void accumulate_some(const float* weights, const std::uint32_t* tokens, std::size_t begin,
                     std::size_t end, const float* v, std::size_t stride, std::size_t depth,
                     float* y) {
  constexpr int kColumns = kWidth == 4 ? 2 : 4;
  std::size_t d = 0;
  for (; d + kColumns * kWidth <= depth; d += kColumns * kWidth)
    accumulate_columns<H, kColumns>(weights, tokens, begin, end, v + d, stride, depth, y + d);
  for (; d + kWidth <= depth; d += kWidth)
    accumulate_columns<H, 1>(weights, tokens, begin, end, v + d, stride, depth, y + d);
  for (; d < depth; ++d)
    for (int h = 0; h < H; ++h) {
      float sum = y[h * depth + d];
      for (std::size_t i = begin; i < end; ++i)
        sum = fused_float(weights[i * kQuad + static_cast<std::size_t>(h)],
                          v[(tokens ? tokens[i] : i) * stride + d], sum);
      y[h * depth + d] = sum;
    }
}

void accumulate_quad(const float* weights, const std::uint32_t* tokens, std::size_t count,
                     std::size_t heads, const float* v, std::size_t stride, std::size_t depth,
                     float* y) {
  constexpr decltype(&accumulate_some<1>) kByHeads[] = {accumulate_some<1>, accumulate_some<2>,
                                                        accumulate_some<3>, accumulate_some<4>};
  constexpr std::size_t kAtOnce = 128;
  for (std::size_t i = 0; i < count; i += kAtOnce)
    kByHeads[heads - 1](weights, tokens, i, count - i < kAtOnce ? count : i + kAtOnce, v, stride,
                        depth, y);
}

void quick_distances(const float* a, const float* b, std::size_t heads, const float* factors,
                     std::size_t count, double* distances) {
  const std::size_t whole = count / kTokens * kTokens;
  for (std::size_t h = 0; h < heads; ++h, a += count, b += count) {
    const float factor = factors[h];
    Floats sum[kPieces] = {};
    for (std::size_t i = 0; i < whole; i += kTokens)
      for (int piece = 0; piece < kPieces; ++piece) {
        const std::size_t at = i + static_cast<std::size_t>(piece * kWidth);
        const Floats x = load(a + at) - factor * load(b + at);
        sum[piece] += x * x;
      }
    const Four four = by_halves(sum, kPieces, [](auto x, auto y) { return x + y; });
    auto all = static_cast<double>((four[0] + four[2]) + (four[1] + four[3]));
    for (std::size_t i = whole; i < count; ++i) {
      const double x = static_cast<double>(a[i]) - static_cast<double>(factor * b[i]);
      all += x * x;
    }
    distances[h] = all;
  }
}

/// Sixteen running sums, index modulo 16, added by halves.
double distance2(const float* a, const float* b, float factor, std::size_t count) {
  double lanes[kTokens] = {};
  std::size_t i = 0;
  for (; i + kTokens <= count; i += kTokens)
    for (int l = 0; l < kTokens; ++l) {
      const double x = static_cast<double>(a[i + l]) - static_cast<double>(factor * b[i + l]);
      lanes[l] += x * x;
    }
  for (int l = 0; i < count; ++i, ++l) {
    const double x = static_cast<double>(a[i]) - static_cast<double>(factor * b[i]);
    lanes[l] += x * x;
  }
  for (int width = kTokens / 2; width > 0; width /= 2)
    for (int l = 0; l < width; ++l) lanes[l] += lanes[l + width];
  return lanes[0];
}

// --- squeezed positions --------------------------------------------------------------------------

constexpr int kPanelPieces = static_cast<int>(kPanelTokens) / kWidth;  // registers of a panel's row

/// Keys behind `gap` move up by one.
void close_gap(float* panel, const float* next, std::size_t gap, std::size_t dim) {
  Ints moves[kPanelPieces];
  for (int c = 0; c < kPanelPieces; ++c)
    for (int l = 0; l < kWidth; ++l)
      moves[c][l] = static_cast<std::size_t>(c * kWidth + l) >= gap ? -1 : 0;
  for (std::size_t d = 0; d < dim; ++d) {
    float* const row = panel + d * kPanelTokens;
    for (int c = 0; c < kPanelPieces; ++c) {
      const Floats stays = load(row + c * kWidth), comes = load(row + c * kWidth + 1);
      store(row + c * kWidth, moves[c] ? comes : stays);
    }
    row[kPanelTokens - 1] = next ? next[d * kPanelTokens] : 0.0f;
  }
}

void turn_panel(const float* panel, const float* cos, const float* sin, std::size_t half,
                std::size_t dim, float* turned) {
  for (std::size_t d = 0; d < half; ++d)
    for (std::size_t i = 0; i < kPanelTokens; i += kWidth) {
      const Floats a = load(panel + d * kPanelTokens + i),
                   b = load(panel + (d + half) * kPanelTokens + i);
      const Floats c = load(cos + d * kPanelTokens + i), s = load(sin + d * kPanelTokens + i);
      store(turned + d * kPanelTokens + i, a * c - b * s);
      store(turned + (d + half) * kPanelTokens + i, b * c + a * s);
    }
  for (std::size_t d = 2 * half; d < dim; ++d)
    std::memcpy(turned + d * kPanelTokens, panel + d * kPanelTokens, kPanelTokens * sizeof(float));
}

/// R queries by P panels, C registers of each.
template <int R, int P, int C>
inline __attribute__((always_inline)) void products_of(const float* keys, std::size_t dim,
                                                       const float* const* queries,
                                                       float* const* out) {
  Floats sum[R][P * C] = {};
  for (std::size_t d = 0; d < dim; ++d) {
    Floats column[P * C];
    for (int c = 0; c < P * C; ++c)
      column[c] = load(keys + ((c / C) * dim + d) * kPanelTokens + (c % C) * kWidth);
    for (int r = 0; r < R; ++r) {
      const Floats factor = queries[r][d] - Floats{};  // for -0 too
      for (int c = 0; c < P * C; ++c) sum[r][c] = fused(factor, column[c], sum[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < P * C; ++c)
      store(out[r] + (c / C) * kPanelTokens + (c % C) * kWidth, sum[r][c]);
}

template <int R>
inline void all_products(const float* keys, std::size_t panels, std::size_t dim,
                         const float* const* queries, float* out, std::size_t out_stride) {
  constexpr int kColumns = kPanelPieces < 2 ? kPanelPieces : 2;
  std::size_t p = 0;
  float* to[R];
  const auto aim = [&](std::size_t i) {
    for (int r = 0; r < R; ++r) to[r] = out + static_cast<std::size_t>(r) * out_stride + i;
  };
  if constexpr (kPanelPieces == kColumns)
    for (; p + 2 <= panels; p += 2) {
      aim(p * kPanelTokens);
      products_of<R, 2, kColumns>(keys + p * dim * kPanelTokens, dim, queries, to);
    }
  for (; p < panels; ++p)
    for (std::size_t i = 0; i < kPanelTokens; i += kColumns * kWidth) {
      aim(p * kPanelTokens + i);
      products_of<R, 1, kColumns>(keys + p * dim * kPanelTokens + i, dim, queries, to);
    }
}

void panel_products(const float* keys, std::size_t panels, std::size_t dim,
                    const float* const* queries, float* out, std::size_t out_stride) {
  int count = 0;
  while (count < kHeads && queries[count]) ++count;
  if (count == 4) all_products<4>(keys, panels, dim, queries, out, out_stride);
  if (count == 3) all_products<3>(keys, panels, dim, queries, out, out_stride);
  if (count == 2) all_products<2>(keys, panels, dim, queries, out, out_stride);
  if (count == 1) all_products<1>(keys, panels, dim, queries, out, out_stride);
}

// --- exponentials --------------------------------------------------------------------------------

/// The shift of a row: round(max / ln 2), as shared_exponentials() takes it.
inline std::int32_t shift_of(const float* logits, std::size_t count, float scale) {
  float most = -__builtin_inff();
  std::size_t i = 0;
  if (count >= kWidth) {
    Floats best = load(logits) * scale;
    for (i = kWidth; i + kWidth <= count; i += kWidth)
      best = greater(load(logits + i) * scale, best);
    most = largest_of(best);
  }
  for (; i < count; ++i) most = logits[i] * scale > most ? logits[i] * scale : most;
  const float rounded = most * kLog2E + kRounder;
  return static_cast<std::int32_t>(rounded - kRounder);
}

/// kWidth logits of the first H heads, rows[h] + first, to their exponentials [token][4].
template <int H>
inline __attribute__((always_inline)) void take_exponentials(const float* const* rows,
                                                             std::size_t first, float scale,
                                                             const std::int32_t* shift, Floats* r) {
  Floats logits[H], e[H];
  for (int h = 0; h < H; ++h) logits[h] = load(rows[h] + first) * scale;
  exponentials_of<H>(logits, shift, e);
  for (int h = 0; h < kHeads; ++h) r[h] = h < H ? out_of_order(e[h]) : Floats{};
  transpose(r);
}

/// Whole blocks of logits to e [count][4] and into their sums.
template <int H>
void write_blocks(const float* const* rows, std::size_t count, float scale,
                  const std::int32_t* shift, float* e, QuadSums& sums) {
  QuadSums all = sums;
  std::int32_t shifts[H];
  for (int h = 0; h < H; ++h) shifts[h] = shift[h];
  for (std::size_t i = 0; i < count; i += kBlockTokens)
    for (int piece = 0; piece < kPieces; ++piece) {
      Floats r[kHeads];
      const std::size_t at = i + static_cast<std::size_t>(piece * kWidth);
      take_exponentials<H>(rows, at, scale, shifts, r);
      for (int j = 0; j < kHeads; ++j) {
        store(e + at * kQuad + j * kWidth, r[j]);
        all.add(piece * kHeads + j, r[j]);
      }
    }
  sums = all;
}

void write_blocks(const float* const* rows, std::size_t count, float scale,
                  const std::int32_t* shift, float* e, QuadSums& sums) {
  constexpr decltype(&write_blocks<1>) kByHeads[] = {write_blocks<1>, write_blocks<2>,
                                                     write_blocks<3>, write_blocks<4>};
  int heads = 1;
  while (heads < kHeads && rows[heads]) ++heads;
  kByHeads[heads - 1](rows, count, scale, shift, e, sums);
}

/// Exponentials of fewer tokens than a block, padded.
inline void write_rest(const float* const* rows, std::size_t count, float scale,
                       const std::int32_t* shift, float* e) {
  float rest[kQuad][kTokens] = {}, last[kBlockFloats];
  const float* parts[kQuad] = {};
  for (int h = 0; h < kHeads; ++h) {
    if (!rows[h]) continue;
    std::memcpy(rest[h], rows[h], count * sizeof(float));
    parts[h] = rest[h];
  }
  QuadSums unused;
  write_blocks(parts, kBlockTokens, scale, shift, last, unused);
  std::memcpy(e, last, count * kQuad * sizeof(float));
  pad(e, count);
}

/// `count` logits of each head to e [count][4], padded to whole blocks, and into their sums.
inline void write_exponentials(const float* const* rows, std::size_t count, float scale,
                               const std::int32_t* shift, float* e, QuadSums& sums) {
  const std::size_t whole = count / kBlockTokens * kBlockTokens;
  write_blocks(rows, whole, scale, shift, e, sums);
  if (whole == count) return;
  const float* rest[kQuad] = {};
  for (int h = 0; h < kHeads; ++h) rest[h] = rows[h] ? rows[h] + whole : nullptr;
  write_rest(rest, count - whole, scale, shift, e + whole * kQuad);
  sums.add_block(e + whole * kQuad);
}

constexpr float kMostExponential = 0x1p30f;

/// Takes a head's exponentials down by a power of two; what falls below 2^-126 becomes 0.
void lower(QuadRow& row, int head, std::int32_t by) {
  const float factor = by > 126 ? 0.0f
                                : 1.0f / static_cast<float>(std::uint64_t{1} << by / 2) /
                                      static_cast<float>(std::uint64_t{1} << (by - by / 2));
  const auto lowered = [factor](float x) { return x * factor < 0x1p-126f ? 0.0f : x * factor; };
  float* const e = row.e + head;
  for (std::size_t i = 0; i < row.tokens; ++i) e[i * kQuad] = lowered(e[i * kQuad]);
  for (std::size_t i = 0; i < kBlockTokens; ++i) {
    row.lanes[i * kQuad + static_cast<std::size_t>(head)] *= factor;
    row.largest[i * kQuad + static_cast<std::size_t>(head)] *= factor;
  }
}

/// Takes the shift of what comes wherever it is above the row's.
void raise_shifts(QuadRow& row, const float* const* logits, std::size_t count, float scale) {
  for (int h = 0; h < kHeads; ++h) {
    if (!logits[h]) continue;
    const std::int32_t shift = shift_of(logits[h], count, scale);
    if (row.tokens > 0 && shift <= row.shift[h]) continue;
    if (row.tokens > 0) lower(row, h, shift - row.shift[h]);
    row.shift[h] = shift;
  }
}

void extend(QuadRow& row, const float* const* logits, std::size_t count, float scale) {
  if (row.tokens == 0) raise_shifts(row, logits, count, scale);
  for (bool again = false;; again = true) {
    QuadSums sums(row.lanes, row.largest);
    write_exponentials(logits, count, scale, row.shift, row.e + row.tokens * kQuad, sums);
    if (again || !sums.any_at_least(kMostExponential)) {
      sums.store_to(row.lanes, row.largest);
      break;
    }
    raise_shifts(row, logits, count, scale);
  }
  row.tokens += count;
}

void finish(const QuadRow& row, float* sum, float* most) {
  QuadSums(row.lanes, row.largest).finish(sum, most);
}

/// How far above a shift the own logits of a joined row may lie, in powers of two.
constexpr std::int32_t kMostAbove = 60;

void join(const float* const* rows, std::size_t old, float scale, const std::int32_t* shift,
          const float* e, std::size_t shared, float* kept, float* sum, float* most) {
  bool large[kQuad] = {};
  for (int h = 0; h < kHeads; ++h)
    large[h] = rows[h] && old > 0 && shift_of(rows[h], old, scale) > shift[h] + kMostAbove;
  QuadSums sums;
  const std::size_t whole = old / kBlockTokens * kBlockTokens, mixed = old - whole;
  write_exponentials(rows, whole, scale, shift, kept, sums);
  std::size_t done = 0;  // of the shared ones
  if (mixed > 0) {
    const float* rest[kQuad] = {};
    for (int h = 0; h < kHeads; ++h) rest[h] = rows[h] ? rows[h] + whole : nullptr;
    write_rest(rest, mixed, scale, shift, kept + whole * kQuad);
    done = shared < kBlockTokens - mixed ? shared : kBlockTokens - mixed;
    if (done > 0) std::memcpy(kept + old * kQuad, e, done * kQuad * sizeof(float));
    sums.add_block(kept + whole * kQuad);
  }
  copy_blocks(e + done * kQuad, shared - done, kept + (old + done) * kQuad, sums);
  sums.finish(sum, most);
  for (int h = 0; h < kHeads; ++h)
    if (large[h]) sum[h] = 0;
}

constexpr RowLoops row_loops_named(const char* name) {
  return {.name = name,
          .extend = extend,
          .finish = finish,
          .gather = gather,
          .gather_around = gather_around,
          .sum = sum_alone,
          .total = total,
          .run_totals = run_totals,
          .masses = masses,
          .mark = mark,
          .flag = flag,
          .flag_head = flag_head,
          .spread = spread,
          .bin = bin,
          .first_least = first_least,
          .common = common,
          .tally = tally,
          .list_weights = list_weights,
          .accumulate = accumulate_quad,
          .distance2 = distance2,
          .quick_distances = quick_distances,
          .close_gap = close_gap,
          .turn_panel = turn_panel,
          .panel_products = panel_products,
          .join = join};
}

}  // namespace
}  // namespace kvlab
