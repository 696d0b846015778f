// Vector registers of the instruction set for which the including file is compiled. Everything is
// in an unnamed namespace and no inline function of the standard library is used, so the linker
// cannot mix the instruction sets.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace kvlab {
namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;  // floats per register
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kWidth)));
typedef std::int32_t Ints __attribute__((vector_size(4 * kWidth)));
typedef std::uint32_t Words __attribute__((vector_size(4 * kWidth)));
typedef std::uint16_t Halves __attribute__((vector_size(2 * kWidth)));

inline Floats load(const float* from) {
  Floats v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
inline Floats load(const std::uint16_t* from) {  // bf16
  Halves half;
  std::memcpy(&half, from, sizeof half);
  const Words word = __builtin_convertvector(half, Words) << 16;
  Floats v;
  std::memcpy(&v, &word, sizeof v);
  return v;
}
inline void store(float* to, Floats v) { std::memcpy(to, &v, sizeof v); }

/// a * b + c, rounded once.
#if defined(__AVX512F__)
constexpr bool kHasFused = true;
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
#elif defined(__AVX2__) && defined(__FMA__)
constexpr bool kHasFused = true;
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
#elif defined(__aarch64__)
constexpr bool kHasFused = true;
inline Floats multiply_add(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
#else
constexpr bool kHasFused = false;
#endif

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__)) || defined(__aarch64__)
inline float fused_float(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
/// In software: the product is exact in double. Its sum with c, rounded to odd, has enough bits
/// that rounding it again to float equals a single rounding (Boldo and Melquiond 2008).
inline float fused_float(float a, float b, float c) {
  const double product = static_cast<double>(a) * static_cast<double>(b),
               added = static_cast<double>(c);
  double sum = product + added;
  const double part = sum - product;
  const double lost = (product - (sum - part)) + (added - part);
  if (lost > 0 || lost < 0) {
    std::int64_t bits;
    std::memcpy(&bits, &sum, sizeof bits);
    if ((bits & 1) == 0) bits += (lost > 0) == (sum > 0) ? 1 : -1;
    std::memcpy(&sum, &bits, sizeof bits);
  }
  return static_cast<float>(sum);
}
inline Floats multiply_add(Floats a, Floats b, Floats c) {
  Floats sum;
  for (int i = 0; i < kWidth; ++i) sum[i] = fused_float(a[i], b[i], c[i]);
  return sum;
}
#endif

}  // namespace
}  // namespace kvlab
