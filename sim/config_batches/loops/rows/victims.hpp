// Which token is evicted first.
#pragma once

#include "sim/config_batches/loops/rows/head_groups.hpp"

namespace kvlab {
namespace {

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
  for (Longs& one : best)
    one = load_longs(ranks + end - kLongs);  // covers the rest after the loops
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

/// The first index of the smallest of at most kFewRanks ranks, which are held in registers.
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

}  // namespace
}  // namespace kvlab
