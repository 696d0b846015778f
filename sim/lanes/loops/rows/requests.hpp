// Which tokens a query requests, as counts and as bits; and rows in bins by size.
#pragma once

#include "sim/lanes/loops/rows/masses.hpp"

namespace kvlab {
namespace {

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

}  // namespace
}  // namespace kvlab
