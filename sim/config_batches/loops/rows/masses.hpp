// Converts exponentials to masses: divides them by their sum, in Q32.32.
#pragma once

#include "policies/observation.hpp"
#include "sim/config_batches/loops/rows/gathering.hpp"

namespace kvlab {
namespace {

/// Divides a head group's exponentials by one sum for each head. The results are correctly rounded.
/// With fused multiply-adds, no element needs a division: the reciprocal of the sum, stored as a
/// high and a low part, gives a first quotient with an error below one unit in the last place. One
/// exact remainder corrects this quotient (Markstein 1990, theorem 8.2). Sums are scaled by 2^-32,
/// so the quotients are probabilities times 2^32.
struct Divisor {
  Floats sum, high, low;

  explicit Divisor(const float* whole) {
    float parts[3][kHeadGroupSize];
    for (std::size_t h = 0; h < kHeadGroupSize; ++h) {
      const float scaled = whole[h] > 0 ? whole[h] * 0x1p-32f : 1.0f, inverse = 1.0f / scaled;
      parts[0][h] = scaled;
      parts[1][h] = inverse;
      parts[2][h] = whole[h] > 0 ? fused_float(-scaled, inverse, 1.0f) * inverse : 0.0f;
    }
    sum = broadcast_four(parts[0]);
    high = broadcast_four(parts[1]);
    low = broadcast_four(parts[2]);
  }
  inline __attribute__((always_inline)) Floats divide(Floats e) const {
    if constexpr (!kHasFused) return e / sum;
    const Floats first = multiply_add(e, high, e * low);
    return multiply_add(multiply_add(-first, sum, e), high, first);
  }
};

/// Rounds to the nearest integer, ties to even. |x| must be below 2^30.
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

bool HeadGroupSums::any_at_least(float bound) const {
  Floats all = maxima[0];
  for (int i = 1; i < kNumMaxima; ++i) all = greater(maxima[i], all);
  return kvlab::any_at_least(all, bound);
}

/// Returns, for each token of four registers [token][4], the sum over its four heads.
template <class V>
inline V over_heads(const V* r) {
  const V ab = unpack<false>(r[0], r[1]) + unpack<true>(r[0], r[1]);
  const V cd = unpack<false>(r[2], r[3]) + unpack<true>(r[2], r[3]);
  return interleave(unpack_pairs<false>(ab, cd) + unpack_pairs<true>(ab, cd));
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

constexpr float kMaxCounted = 0x1p30f;  // four values below this have a sum that fits into 32 bits

/// Adds the values that are too large for 32-bit counts directly to the masses, and sets them to 0
/// in the registers [token][4]. Floats of this size are whole numbers, so they need no rounding.
inline __attribute__((noinline)) void add_large(Floats* scaled, std::uint64_t* mass) {
  for (int r = 0; r < kHeads; ++r) {
    if (!any_at_least(scaled[r], kMaxCounted)) continue;
    for (int i = 0; i < kWidth; ++i) {
      if (scaled[r][i] < kMaxCounted) continue;
      mass[r * kHeadGroups + i / kHeads] += static_cast<std::uint64_t>(scaled[r][i]);
      scaled[r][i] = 0;
    }
  }
}

void masses(const float* kept, std::size_t count, const float* sum, bool first,
            std::uint64_t* mass) {
  const Divisor divisor(sum);
  const std::size_t padded = whole_blocks(count);
  for (std::size_t i = 0; i < padded; i += kWidth, kept += kWidth * kHeadGroupSize) {
    Floats scaled[kHeads];
    for (int r = 0; r < kHeads; ++r) scaled[r] = divisor.divide(load(kept + r * kWidth));
    const Floats maxima = greater(greater(scaled[0], scaled[1]), greater(scaled[2], scaled[3]));
    bool fresh = first;
    if (__builtin_expect(any_at_least(maxima, kMaxCounted), 0)) {
      if (first) std::memset(mass + i, 0, kWidth * sizeof(std::uint64_t));
      fresh = false;
      // Only add_large() needs the values in memory. It gets a copy, so that `scaled` can stay in
      // registers.
      Floats large[kHeads];
      for (int r = 0; r < kHeads; ++r) large[r] = scaled[r];
      add_large(large, mass + i);
      for (int r = 0; r < kHeads; ++r) scaled[r] = large[r];
    }
    Words counts[kHeads];
    for (int r = 0; r < kHeads; ++r) counts[r] = reinterpret_cast<Words>(nearest(scaled[r]));
    add_counts(over_heads(counts), fresh, mass + i);
  }
}

}  // namespace
}  // namespace kvlab
