// Operations on registers that hold the values of a head group (four heads), for several tokens,
// [token][4], or for one token.
#pragma once

#include "sim/config_batches/loops/row_loops.hpp"
#include "traces/base/numeric/vectors.hpp"

namespace kvlab {
namespace {

constexpr int kHeads = static_cast<int>(kHeadGroupSize);
constexpr int kTokens = static_cast<int>(kBlockTokens);
constexpr int kHeadGroups = kWidth / kHeads;                    // tokens in a register
constexpr int kBlockParts = kTokens / kHeadGroups;              // registers of a block, [16][4]
constexpr int kPieces = kTokens / kWidth;                       // registers for one head of a block
constexpr std::size_t kBlockFloats = kTokens * kHeadGroupSize;  // floats of a block

/// Loads the exponentials of kHeadGroups tokens into a register.
#if defined(__AVX512F__)
inline Floats load_head_groups(const float* a, const float* b, const float* c, const float* d) {
  const __m512 ab = _mm512_insertf32x4(_mm512_castps128_ps512(_mm_loadu_ps(a)), _mm_loadu_ps(b), 1);
  return _mm512_insertf32x4(_mm512_insertf32x4(ab, _mm_loadu_ps(c), 2), _mm_loadu_ps(d), 3);
}
#elif defined(__AVX2__)
inline Floats load_head_groups(const float* a, const float* b, const float*, const float*) {
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(a)), _mm_loadu_ps(b), 1);
}
#else
inline Floats load_head_groups(const float* a, const float*, const float*, const float*) {
  return load(a);
}
#endif

/// Loads the exponentials of tokens[0], …, tokens[kHeadGroups - 1].
inline Floats load_scattered(const float* e, const std::uint32_t* tokens) {
  const auto at = [&](int i) { return e + std::size_t{tokens[i]} * kHeadGroupSize; };
  if constexpr (kHeadGroups == 4) return load_head_groups(at(0), at(1), at(2), at(3));
  if constexpr (kHeadGroups == 2) return load_head_groups(at(0), at(1), nullptr, nullptr);
  return load_head_groups(at(0), nullptr, nullptr, nullptr);
}

/// Repeats four floats for each of the kHeadGroups tokens of a register.
inline Floats broadcast_four(const float* four) {
  Floats v;
  for (int i = 0; i < kWidth; ++i) v[i] = four[i % kHeads];
  return v;
}

/// Selects elements of a and b by the indices I. The elements of b are numbered after those of a.
template <int... I, class V>
inline V shuffle(V a, V b) {
#if !defined(__clang__) && __GNUC__ < 12  // GCC before 12 has no __builtin_shufflevector
  return __builtin_shuffle(a, b, decltype(a < b){I...});
#else
  return __builtin_shufflevector(a, b, I...);
#endif
}

/// Interleaves elements within each group of four: (a0 b0 a1 b1) or, if High, (a2 b2 a3 b3).
template <bool High, class V>
inline V unpack(V a, V b) {
  constexpr int o = High ? 2 : 0;
  if constexpr (kWidth == 16)
    return shuffle<o, o + 16, o + 1, o + 17, o + 4, o + 20, o + 5, o + 21, o + 8, o + 24, o + 9,
                   o + 25, o + 12, o + 28, o + 13, o + 29>(a, b);
  else if constexpr (kWidth == 8)
    return shuffle<o, o + 8, o + 1, o + 9, o + 4, o + 12, o + 5, o + 13>(a, b);
  else
    return shuffle<o, o + 4, o + 1, o + 5>(a, b);
}

/// Interleaves pairs of elements: (a0 a1 b0 b1) or, if High, (a2 a3 b2 b3).
template <bool High, class V>
inline V unpack_pairs(V a, V b) {
  constexpr int o = High ? 2 : 0;
  if constexpr (kWidth == 16)
    return shuffle<o, o + 1, o + 16, o + 17, o + 4, o + 5, o + 20, o + 21, o + 8, o + 9, o + 24,
                   o + 25, o + 12, o + 13, o + 28, o + 29>(a, b);
  else if constexpr (kWidth == 8)
    return shuffle<o, o + 1, o + 8, o + 9, o + 4, o + 5, o + 12, o + 13>(a, b);
  else
    return shuffle<o, o + 1, o + 4, o + 5>(a, b);
}

/// Moves element j of the k-th group of four to index kHeadGroups j + k. After transpose() of four
/// registers [token][4], this puts the tokens in order.
template <class V>
inline V interleave(V v) {
  if constexpr (kWidth == 16)
    return shuffle<0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15>(v, v);
  else if constexpr (kWidth == 8)
    return shuffle<0, 4, 1, 5, 2, 6, 3, 7>(v, v);
  else
    return v;
}
/// The inverse of interleave().
template <class V>
inline V deinterleave(V v) {
  if constexpr (kWidth == 8)
    return shuffle<0, 2, 4, 6, 1, 3, 5, 7>(v, v);
  else
    return interleave(v);
}

/// Transposes within each group of four elements: exchanges element j of register i and element i
/// of register j.
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
  float maximum = v[0];
  for (int i = 1; i < kWidth; ++i) maximum = v[i] > maximum ? v[i] : maximum;
  return maximum;
}

/// The values of four heads for one token. It has 16 bytes with every instruction set.
typedef float Four __attribute__((vector_size(16)));
typedef std::int32_t FourInts __attribute__((vector_size(16)));

inline Four load_four(const float* from) {
  Four v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

/// Reduces registers [token][4] over their tokens. Combines the first half of the registers with
/// the second half by `join`, and repeats this until one value per head is left.
template <class Join>
inline __attribute__((always_inline)) Four by_halves(Floats* parts, int count, Join join) {
  for (int width = count / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) parts[i] = join(parts[i], parts[i + width]);
  Four head_groups[kHeadGroups];
  std::memcpy(head_groups, parts, sizeof head_groups);
  for (int width = kHeadGroups / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) head_groups[i] = join(head_groups[i], head_groups[i + width]);
  return head_groups[0];
}

/// Adds up the registers of a block and stores one sum for each head.
inline void store_sums(const Floats* lanes, float* sum) {
  Floats parts[kBlockParts];
  std::memcpy(parts, lanes, sizeof parts);
  const Four all = by_halves(parts, kBlockParts, [](auto a, auto b) { return a + b; });
  std::memcpy(sum, &all, sizeof all);
}

}  // namespace
}  // namespace kvlab
