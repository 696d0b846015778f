// Finds which tokens a query requests, as flags and as bits, and puts a row's values into bins by
// size.
#pragma once

#include "sim/config_batches/loops/rows/masses.hpp"

namespace kvlab {
namespace {

inline Ints load_ints(const std::uint32_t* from) {
  Ints v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

void mark(const float* kept, std::size_t count, const float* request_threshold, bool first,
          std::uint32_t* requested) {
  const Floats bound = broadcast_four(request_threshold);
  const std::size_t padded = whole_blocks(count);
  for (std::size_t i = 0; i < padded; i += kWidth, kept += kWidth * kHeadGroupSize) {
    Ints wants[kHeads];
    for (int r = 0; r < kHeads; ++r) wants[r] = load(kept + r * kWidth) >= bound;
    Ints flags = (over_heads(wants) != 0) & 1;
    if (!first) flags |= load_ints(requested + i);
    std::memcpy(requested + i, &flags, sizeof flags);
  }
}

/// Bit i of the result: whether element i of `v` is at least element i of `bound`.
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

/// A word whose lowest `count` bits are set; all bits if count is 64 or more.
inline std::uint64_t first_bits(std::size_t count) {
  return count < 64 ? (std::uint64_t{1} << count) - 1 : ~std::uint64_t{0};
}

void flag(const float* e, std::size_t count, const float* request_threshold, std::uint64_t* bits,
          std::size_t words) {
  for (std::size_t w = 0; w * 64 < count; ++w) {
    std::uint64_t all[kHeadGroupSize] = {};
    for (std::size_t i = 0; i < 64 && w * 64 + i < count; i += kWidth) {
      Floats r[kHeads];
      for (int j = 0; j < kHeads; ++j) r[j] = load(e + (w * 64 + i) * kHeadGroupSize + j * kWidth);
      transpose(r);
      for (int h = 0; h < kHeads; ++h)
        all[h] |= mask_of(interleave(r[h]), Floats{} + request_threshold[h]) << i;
    }
    const std::uint64_t seen = first_bits(count - w * 64);
    for (std::size_t h = 0; h < kHeadGroupSize; ++h) bits[h * words + w] = all[h] & seen;
  }
}

void bin(const float* e, std::size_t count, const std::uint32_t* max_words,
         const std::uint32_t* shift, std::uint32_t last_bin, std::uint32_t* bits,
         std::uint16_t* bins, std::size_t stride) {
  for (std::size_t i = 0; i < count; i += kWidth) {
    Floats r[kHeads];
    for (int j = 0; j < kHeads; ++j) r[j] = load(e + i * kHeadGroupSize + j * kWidth);
    transpose(r);
    Words rest;
    for (int l = 0; l < kWidth; ++l)
      rest[l] = last_bin + (static_cast<std::uint32_t>(i) + static_cast<std::uint32_t>(l)) %
                               static_cast<std::uint32_t>(kRestBins);
    for (int h = 0; h < kHeads; ++h) {
      const Floats own = interleave(r[h]);
      Words word;
      std::memcpy(&word, &own, sizeof word);
      const Words bin = (max_words[h] - word) >> shift[h];
      const Words binned = bin < last_bin ? bin : rest;
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
