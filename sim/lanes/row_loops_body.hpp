// The text of the row loops. Included by one source file for each instruction set, by the rules of
// traces/numeric/vectors.hpp.
#pragma once

#include "policies/observation.hpp"
#include "sim/lanes/row_loops.hpp"
#include "traces/numeric/exponential.hpp"
#include "traces/numeric/vectors.hpp"

namespace kvlab {
namespace {

constexpr int kHeads = static_cast<int>(kQuad);
constexpr int kTokens = static_cast<int>(kBlockTokens);
constexpr int kPieces = kTokens / kWidth;  // registers for one head of a block
constexpr int kQuadsInRegister = kWidth / kHeads;

// --- a quad's registers ------------------------------------------------------------------------

inline Words as_words(Ints v) {
  Words w;
  std::memcpy(&w, &v, sizeof w);
  return w;
}

/// The four exponentials of kWidth / 4 tokens, `tokens[0], tokens[4], …` of a register's tokens.
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

/// Unpacks pairs within each lane of four: (a0 b0 a1 b1) or, high, (a2 b2 a3 b3).
template <bool High, int... I>
inline Floats unpack(Floats a, Floats b) {
  if constexpr (kWidth == 16) {
    constexpr int o = High ? 2 : 0;
    return __builtin_shufflevector(a, b, o, o + 16, o + 1, o + 17, o + 4, o + 20, o + 5, o + 21,
                                   o + 8, o + 24, o + 9, o + 25, o + 12, o + 28, o + 13, o + 29);
  } else if constexpr (kWidth == 8) {
    constexpr int o = High ? 2 : 0;
    return __builtin_shufflevector(a, b, o, o + 8, o + 1, o + 9, o + 4, o + 12, o + 5, o + 13);
  } else {
    constexpr int o = High ? 2 : 0;
    return __builtin_shufflevector(a, b, o, o + 4, o + 1, o + 5);
  }
}

/// Four registers of (token, head) to four of (head, token), within each lane of four: rows r of
/// lane k hold token 4 k + r before, head r after.
inline void transpose(Floats* r) {
  const Floats a = unpack<false>(r[0], r[2]), b = unpack<false>(r[1], r[3]);
  const Floats c = unpack<true>(r[0], r[2]), d = unpack<true>(r[1], r[3]);
  r[0] = unpack<false>(a, b);
  r[1] = unpack<true>(a, b);
  r[2] = unpack<false>(c, d);
  r[3] = unpack<true>(c, d);
}

/// Loads the quads of kWidth tokens and turns them: r[h] holds head h of the tokens in order.
struct Scattered {
  const float* e;
  const std::uint32_t* tokens;
  inline __attribute__((always_inline)) const float* at(int i) const {
    return e + std::size_t{tokens[i]} * kQuad;
  }
  inline __attribute__((always_inline)) void load_turned(std::size_t first, Floats* r) const {
    const Scattered from{e, tokens + first};
    for (int i = 0; i < kHeads; ++i)
      r[i] = kWidth == 16  ? load_quads(from.at(i), from.at(i + 4), from.at(i + 8), from.at(i + 12))
             : kWidth == 8 ? load_quads(from.at(i), from.at(i + 4), nullptr, nullptr)
                           : load_quads(from.at(i), nullptr, nullptr, nullptr);
    transpose(r);
  }
};
struct Contiguous {
  const float* e;
  const std::uint32_t* tokens;  // not looked at
  inline __attribute__((always_inline)) void load_turned(std::size_t first, Floats* r) const {
    const float* from = e + first * kQuad;
    for (int i = 0; i < kHeads; ++i)
      r[i] = load_quads(from + 4 * i, from + 16 + 4 * i, from + 32 + 4 * i, from + 48 + 4 * i);
    transpose(r);
  }
};

inline Floats greater(Floats a, Floats b) { return a > b ? a : b; }

inline float largest_of(Floats v) {
  float most = v[0];
  for (int i = 1; i < kWidth; ++i) most = v[i] > most ? v[i] : most;
  return most;
}

/// Sixteen running sums, added by halves.
inline float by_halves(const Floats* pieces) {
  float lanes[kTokens];
  for (int c = 0; c < kPieces; ++c) store(lanes + c * kWidth, pieces[c]);
  for (int width = kTokens / 2; width > 0; width /= 2)
    for (int l = 0; l < width; ++l) lanes[l] += lanes[l + width];
  return lanes[0];
}

/// The last tokens of a row, padded with zeros to whole blocks, as a row of their own.
struct Tail {
  alignas(64) float e[kBlockTokens * kQuad] = {};

  template <class From>
  Tail(const From& from, std::size_t first, std::size_t count) {
    for (std::size_t i = first; i < count; ++i) {
      const std::size_t token = from.tokens ? from.tokens[i] : i;
      std::memcpy(e + (i - first) * kQuad, from.e + token * kQuad, kQuad * sizeof(float));
    }
  }
};

// --- gathering -----------------------------------------------------------------------------------

struct Gathered {
  Floats sum[kHeads][kPieces] = {}, most[kHeads] = {};

  template <class From>
  inline __attribute__((always_inline)) void take(const From& from, std::size_t first,
                                                  float* kept) {
    for (int c = 0; c < kPieces; ++c) {
      Floats r[kHeads];
      from.load_turned(first + c * kWidth, r);
      for (int h = 0; h < kHeads; ++h) {
        store(kept + h * kTokens + c * kWidth, r[h]);
        sum[h][c] += r[h];
        most[h] = greater(r[h], most[h]);
      }
    }
  }
};

template <class From>
inline void gather_from(const From& from, std::size_t count, float* kept, float* sum, float* most) {
  Gathered all;
  std::size_t i = 0;
  for (; i + kBlockTokens <= count; i += kBlockTokens, kept += kKeptFloats) all.take(from, i, kept);
  if (i < count) {
    const Tail tail(from, i, count);
    all.take(Contiguous{tail.e, nullptr}, 0, kept);
  }
  for (int h = 0; h < kHeads; ++h) {
    sum[h] = by_halves(all.sum[h]);
    most[h] = largest_of(all.most[h]);
  }
}

void gather(const float* e, const std::uint32_t* tokens, std::size_t count, float* kept, float* sum,
            float* most) {
  if (tokens)
    gather_from(Scattered{e, tokens}, count, kept, sum, most);
  else
    gather_from(Contiguous{e, nullptr}, count, kept, sum, most);
}

/// Four heads of one token in a register of four, whatever the set.
typedef float Four __attribute__((vector_size(16)));
typedef std::int32_t FourInts __attribute__((vector_size(16)));

inline Four load_four(const float* from) {
  Four v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

void total(const float* e, const std::uint32_t* tokens, std::size_t count, const float* least,
           float* sum, std::uint32_t* hits) {
  constexpr int kSums = 4;
  const Four bound = load_four(least);
  Four sums[kSums] = {};
  FourInts asked[kSums] = {};
  std::size_t i = 0;
  for (; i + kSums <= count; i += kSums)
    for (int s = 0; s < kSums; ++s) {
      const Four one = load_four(e + std::size_t{tokens ? tokens[i + s] : i + s} * kQuad);
      sums[s] += one;
      asked[s] -= one >= bound;
    }
  for (; i < count; ++i) {
    const Four one = load_four(e + std::size_t{tokens ? tokens[i] : i} * kQuad);
    sums[0] += one;
    asked[0] -= one >= bound;
  }
  const Four all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  const FourInts wanted = (asked[0] + asked[1]) + (asked[2] + asked[3]);
  for (int h = 0; h < kHeads; ++h) {
    sum[h] = all[h];
    hits[h] += static_cast<std::uint32_t>(wanted[h]);
  }
}

// --- masses --------------------------------------------------------------------------------------

/// Divides by one sum, rounded correctly, without a division for each element where the machine
/// fuses: a faithful first quotient from the reciprocal in two parts, then one exact remainder
/// (Markstein 1990, theorem 8.2). The sum is scaled by 2^-32, so quotients are p * 2^32.
struct Divisor {
  Floats sum, high, low;

  explicit Divisor(float whole) {
    const float scaled = whole > 0 ? whole * 0x1p-32f : 1.0f;
    const Floats zero = {};
    sum = zero + scaled;
    high = zero + 1.0f / scaled;
    low = whole > 0 ? fused(-sum, high, zero + 1.0f) * high : zero;
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

/// Adds a register of 32-bit counts to 64-bit masses.
inline __attribute__((always_inline)) void add_counts(Ints counts, bool first,
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

/// The same where a probability is too large for the counts.
inline void add_exactly(const Floats* scaled, bool first, std::uint64_t* mass) {
  for (int i = 0; i < kWidth; ++i) {
    std::uint64_t all = first ? 0 : mass[i];
    for (int h = 0; h < kHeads; ++h) all += fixed_mass(1.0f, scaled[h][i] * 0x1p-32f);
    mass[i] = all;
  }
}

void masses(const float* kept, std::size_t count, const float* sum, bool first,
            std::uint64_t* mass) {
  const Divisor divisors[kHeads]{Divisor(sum[0]), Divisor(sum[1]), Divisor(sum[2]),
                                 Divisor(sum[3])};
  for (std::size_t i = 0; i < count; i += kBlockTokens, kept += kKeptFloats)
    for (int c = 0; c < kPieces; ++c) {
      Floats scaled[kHeads];
      for (int h = 0; h < kHeads; ++h)
        scaled[h] = divisors[h].divide(load(kept + h * kTokens + c * kWidth));
      const Floats most = greater(greater(scaled[0], scaled[1]), greater(scaled[2], scaled[3]));
      std::uint64_t* to = mass + i + c * kWidth;
      if (__builtin_expect(any_at_least(most, 0x1p29f), 0)) {
        add_exactly(scaled, first, to);
        continue;
      }
      Ints counts = {};
      for (int h = 0; h < kHeads; ++h) counts += nearest(scaled[h]);
      add_counts(counts, first, to);
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
  for (std::size_t i = 0; i < count; i += kBlockTokens, kept += kKeptFloats)
    for (int c = 0; c < kPieces; ++c) {
      Ints any = {};
      for (int h = 0; h < kHeads; ++h) any |= load(kept + h * kTokens + c * kWidth) >= least[h];
      std::uint32_t* to = asked + i + c * kWidth;
      Ints flags = any & 1;
      if (!first) flags |= load_ints(to);
      std::memcpy(to, &flags, sizeof flags);
    }
}

void flag(const float* e, std::size_t count, const float* least, std::uint64_t* bits,
          std::size_t words) {
  for (std::size_t w = 0; w * 64 < count; ++w) {
    const std::size_t size = count - w * 64 < 64 ? count - w * 64 : 64;
    std::uint64_t all[kQuad] = {};
    for (std::size_t i = 0; i < size; ++i)
      for (std::size_t h = 0; h < kQuad; ++h)
        all[h] |= std::uint64_t{e[(w * 64 + i) * kQuad + h] >= least[h]} << i;
    for (std::size_t h = 0; h < kQuad; ++h) bits[h * words + w] = all[h];
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

std::uint64_t least_of(const std::uint64_t* ranks, std::size_t begin, std::size_t end) {
  std::uint64_t least = ranks[begin];
  std::size_t i = begin;
  if (end - begin >= 4 * kLongs) {
    Longs best[4];
    for (std::size_t s = 0; s < 4; ++s) best[s] = load_longs(ranks + i + s * kLongs);
    for (i += 4 * kLongs; i + 4 * kLongs <= end; i += 4 * kLongs)
      for (std::size_t s = 0; s < 4; ++s) {
        const Longs next = load_longs(ranks + i + s * kLongs);
        best[s] = next < best[s] ? next : best[s];
      }
    for (std::size_t s = 0; s < 4; ++s)
      for (std::size_t l = 0; l < kLongs; ++l) least = best[s][l] < least ? best[s][l] : least;
  }
  for (; i < end; ++i) least = ranks[i] < least ? ranks[i] : least;
  return least;
}

std::size_t first_least(const std::uint64_t* ranks, std::size_t begin, std::size_t end) {
  const std::uint64_t least = least_of(ranks, begin, end);
  std::size_t i = begin;
  while (ranks[i] != least) ++i;
  return i;
}

// --- outputs -------------------------------------------------------------------------------------

/// Weights [token][4].
struct ByToken {
  const float* weights;
  inline __attribute__((always_inline)) float at(std::size_t i, int h) const {
    return weights[i * kQuad + static_cast<std::size_t>(h)];
  }
};
/// Weights [blocks][4][16].
struct ByBlock {
  const float* kept;
  inline __attribute__((always_inline)) float at(std::size_t i, int h) const {
    return kept[i / kBlockTokens * kKeptFloats + static_cast<std::size_t>(h) * kBlockTokens +
                i % kBlockTokens];
  }
};

/// P registers of each head's sums, over tokens [begin, end).
template <int P, class Weights>
inline void accumulate_columns(Weights weights, const std::uint32_t* tokens, std::size_t begin,
                               std::size_t end, const float* v, std::size_t stride,
                               std::size_t depth, float* y) {
  Floats sum[kHeads][P];
  for (int h = 0; h < kHeads; ++h)
    for (int p = 0; p < P; ++p) sum[h][p] = load(y + h * depth + p * kWidth);
  for (std::size_t i = begin; i < end; ++i) {
    const float* row = v + (tokens ? tokens[i] : i) * stride;
    Floats column[P];
    for (int p = 0; p < P; ++p) column[p] = load(row + p * kWidth);
    for (int h = 0; h < kHeads; ++h) {
      const Floats factor = weights.at(i, h) - Floats{};  // for -0 too
      for (int p = 0; p < P; ++p) sum[h][p] = fused(factor, column[p], sum[h][p]);
    }
  }
  for (int h = 0; h < kHeads; ++h)
    for (int p = 0; p < P; ++p) store(y + h * depth + p * kWidth, sum[h][p]);
}

/// Some tokens, few enough that their values stay in the nearest cache for all columns.
template <class Weights>
void accumulate_some(Weights weights, const std::uint32_t* tokens, std::size_t begin,
                     std::size_t end, const float* v, std::size_t stride, std::size_t depth,
                     float* y) {
  constexpr int kColumns = kWidth == 4 ? 2 : 4;
  std::size_t d = 0;
  for (; d + kColumns * kWidth <= depth; d += kColumns * kWidth)
    accumulate_columns<kColumns>(weights, tokens, begin, end, v + d, stride, depth, y + d);
  for (; d + kWidth <= depth; d += kWidth)
    accumulate_columns<1>(weights, tokens, begin, end, v + d, stride, depth, y + d);
  for (; d < depth; ++d)
    for (int h = 0; h < kHeads; ++h) {
      float sum = y[h * depth + d];
      for (std::size_t i = begin; i < end; ++i)
        sum = fused_float(weights.at(i, h), v[(tokens ? tokens[i] : i) * stride + d], sum);
      y[h * depth + d] = sum;
    }
}

template <class Weights>
inline void accumulate_all(Weights weights, const std::uint32_t* tokens, std::size_t begin,
                           std::size_t end, const float* v, std::size_t stride, std::size_t depth,
                           float* y) {
  constexpr std::size_t kAtOnce = 32;
  for (std::size_t i = begin; i < end; i += kAtOnce)
    accumulate_some(weights, tokens, i, end - i < kAtOnce ? end : i + kAtOnce, v, stride, depth, y);
}

void accumulate_quad(const float* weights, const std::uint32_t* tokens, std::size_t count,
                     const float* v, std::size_t stride, std::size_t depth, float* y) {
  accumulate_all(ByToken{weights}, tokens, 0, count, v, stride, depth, y);
}

void accumulate_kept(const float* kept, const std::uint32_t* tokens, std::size_t begin,
                     std::size_t end, const float* v, std::size_t stride, std::size_t depth,
                     float* y) {
  accumulate_all(ByBlock{kept}, tokens, begin, end, v, stride, depth, y);
}

// --- squeezed positions --------------------------------------------------------------------------

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

constexpr int kPanelPieces = static_cast<int>(kPanelTokens) / kWidth;  // registers of a panel's row

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

struct Exponentials {
  std::int32_t shift[kHeads] = {};
  Floats sum[kHeads][kPieces] = {}, most[kHeads] = {};

  /// One block of logits, [4] rows, to e [16][4].
  inline __attribute__((always_inline)) void take(const float* const* rows, std::size_t first,
                                                  float scale, float* e) {
    for (int c = 0; c < kPieces; ++c) {
      Floats r[kHeads];
      for (int h = 0; h < kHeads; ++h) {
        r[h] = Floats{};
        if (!rows[h]) continue;
        r[h] = exponential(load(rows[h] + first + c * kWidth) * scale, shift[h]);
        sum[h][c] += r[h];
        most[h] = greater(r[h], most[h]);
      }
      transpose(r);  // lane k of register i: token 4 k + i of the register's
      for (int i = 0; i < kHeads; ++i)
        for (int k = 0; k < kQuadsInRegister; ++k)
          std::memcpy(e + (c * kWidth + 4 * k + i) * kHeads,
                      reinterpret_cast<const char*>(&r[i]) + 16 * k, 16);
    }
  }
};

void exponentials_quad(const float* const* rows, std::size_t count, float scale, float* e,
                       float* sum, float* most, std::int32_t* shift) {
  Exponentials all;
  for (int h = 0; h < kHeads; ++h)
    if (rows[h]) all.shift[h] = shift_of(rows[h], count, scale);
  std::size_t i = 0;
  for (; i + kBlockTokens <= count; i += kBlockTokens) all.take(rows, i, scale, e + i * kQuad);
  if (i < count) {
    alignas(64) float rest[kQuad][kBlockTokens], last[kKeptFloats];
    const float* parts[kQuad] = {};
    for (int h = 0; h < kHeads; ++h) {
      if (!rows[h]) continue;
      for (float& x : rest[h]) x = -__builtin_inff();
      std::memcpy(rest[h], rows[h] + i, (count - i) * sizeof(float));
      parts[h] = rest[h];
    }
    all.take(parts, 0, scale, last);
    std::memcpy(e + i * kQuad, last, (count - i) * kQuad * sizeof(float));
  }
  for (int h = 0; h < kHeads; ++h) {
    sum[h] = by_halves(all.sum[h]);
    most[h] = largest_of(all.most[h]);
    shift[h] = all.shift[h];
  }
}

// --- joined rows ---------------------------------------------------------------------------------

/// How far above a shift the own logits of a row may lie, in powers of two.
constexpr std::int32_t kMostAbove = 60;

/// A block of own logits: their exponentials by head, [4][16].
inline __attribute__((always_inline)) void take_own(const float* const* rows, std::size_t first,
                                                    float scale, const std::int32_t* shift,
                                                    float* kept) {
  for (int h = 0; h < kHeads; ++h)
    for (int c = 0; c < kPieces; ++c)
      store(kept + h * kTokens + c * kWidth,
            rows[h] ? exponential(load(rows[h] + first + c * kWidth) * scale, shift[h]) : Floats{});
}

inline __attribute__((always_inline)) void count_block(const float* kept, Gathered& all) {
  for (int h = 0; h < kHeads; ++h) {
    for (int c = 0; c < kPieces; ++c) {
      const Floats e = load(kept + h * kTokens + c * kWidth);
      all.sum[h][c] += e;
      all.most[h] = greater(e, all.most[h]);
    }
  }
}

/// The block that holds the last `own` logits of its own and the first shared exponentials. Returns
/// how many of these.
inline std::size_t take_border(const float* const* rows, std::size_t first, std::size_t own,
                               float scale, const std::int32_t* shift, const float* e,
                               std::size_t shared, float* kept) {
  float padded[kQuad][kBlockTokens] = {};
  const float* parts[kQuad] = {};
  for (int h = 0; h < kHeads; ++h) {
    if (!rows[h]) continue;
    std::memcpy(padded[h], rows[h] + first, own * sizeof(float));
    parts[h] = padded[h];
  }
  take_own(parts, 0, scale, shift, kept);
  for (std::size_t i = own; i < kBlockTokens; ++i)
    for (std::size_t h = 0; h < kQuad; ++h)
      kept[h * kBlockTokens + i] = i - own < shared ? e[(i - own) * kQuad + h] : 0.0f;
  return kBlockTokens - own < shared ? kBlockTokens - own : shared;
}

void join(const float* const* rows, std::size_t old, float scale, const std::int32_t* shift,
          const float* e, std::size_t shared, float* kept, float* sum, float* most) {
  Gathered all;
  bool large[kQuad] = {};
  for (int h = 0; h < kHeads; ++h)
    large[h] = rows[h] && old > 0 && shift_of(rows[h], old, scale) > shift[h] + kMostAbove;
  std::size_t i = 0, taken = 0;
  for (; i + kBlockTokens <= old; i += kBlockTokens, kept += kKeptFloats) {
    take_own(rows, i, scale, shift, kept);
    count_block(kept, all);
  }
  if (i < old) {
    taken = take_border(rows, i, old - i, scale, shift, e, shared, kept);
    count_block(kept, all);
    kept += kKeptFloats;
  }
  for (; taken + kBlockTokens <= shared; taken += kBlockTokens, kept += kKeptFloats)
    all.take(Contiguous{e, nullptr}, taken, kept);
  if (taken < shared) {
    const Tail tail(Contiguous{e, nullptr}, taken, shared);
    all.take(Contiguous{tail.e, nullptr}, 0, kept);
  }
  for (int h = 0; h < kHeads; ++h) {
    sum[h] = large[h] ? 0.0f : by_halves(all.sum[h]);
    most[h] = largest_of(all.most[h]);
  }
}

constexpr RowLoops row_loops_named(const char* name) {
  return {.name = name,
          .exponentials = exponentials_quad,
          .gather = gather,
          .total = total,
          .masses = masses,
          .mark = mark,
          .flag = flag,
          .first_least = first_least,
          .common = common,
          .accumulate = accumulate_quad,
          .turn_panel = turn_panel,
          .panel_products = panel_products,
          .join = join,
          .accumulate_kept = accumulate_kept};
}

}  // namespace
}  // namespace kvlab
