// Matrix products by one warp (sm_80 and later), the tiles in shared memory that they read, and the
// asynchronous copies that fill these tiles.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace kvlab::kernels {

/// Packs two floats into a register as two elements. `low` comes first in memory.
template <class T>
__device__ inline std::uint32_t pack(float low, float high);
template <>
__device__ inline std::uint32_t pack<__nv_bfloat16>(float low, float high) {
  std::uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
template <>
__device__ inline std::uint32_t pack<__half>(float low, float high) {
  std::uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

/// Unpacks a register into two floats.
template <class T>
__device__ inline float2 unpack(std::uint32_t packed);
template <>
__device__ inline float2 unpack<__nv_bfloat16>(std::uint32_t packed) {
  return make_float2(__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u));
}
template <>
__device__ inline float2 unpack<__half>(std::uint32_t packed) {
  return __half22float2(reinterpret_cast<const __half2&>(packed));
}

/// c[16 x 8] += a[16 x 16] * b[16 x 8]. With g = l / 4 and t = l % 4, lane l holds:
/// - in a[0] to a[3], rows g, g + 8, g, g + 8, at columns 2t, 2t, 2t + 8, 2t + 8. Each of these
///   registers has two elements: that column and the next one.
/// - in b0 and b1, column g, at rows 2t and 2t + 8. Each of these registers has two elements: that
///   row and the next one.
/// - in c[0] to c[3], rows g, g, g + 8, g + 8, at columns 2t, 2t + 1, 2t, 2t + 1.
template <class T>
__device__ inline void multiply_add(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                    std::uint32_t b1);
template <>
__device__ inline void multiply_add<__nv_bfloat16>(float (&c)[4], const std::uint32_t (&a)[4],
                                                   std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ inline void multiply_add<__half>(float (&c)[4], const std::uint32_t (&a)[4],
                                            std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// An address in shared memory, in the form that the instructions below take.
__device__ inline std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

/// Loads four 8 x 8 matrices of 2-byte elements. Lane l gives the address of row l % 8 of matrix l
/// / 8.
__device__ inline void load_matrices(std::uint32_t (&m)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}
__device__ inline void load_matrices_transposed(std::uint32_t (&m)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

/// Transposes an 8 x 8 matrix of 2-byte elements. Lane l has row l / 4, columns l % 4 * 2 and l % 4
/// * 2 + 1.
__device__ inline std::uint32_t transpose_matrix(std::uint32_t row) {
  std::uint32_t column;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(column) : "r"(row));
  return column;
}

/// Copies 16 bytes from global to shared memory, bypassing the L1 cache. If not `wanted`, writes
/// zeros and reads nothing.
__device__ inline void copy_async(std::uint32_t to, const void* from, bool wanted) {
  const int bytes = wanted ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(bytes)
               : "memory");
}
/// A policy for how the L2 cache keeps the lines of a copy.
using CachePolicy = std::uint64_t;
/// If `read_once`, returns the policy under which the lines are evicted first; otherwise the
/// default policy.
__device__ inline CachePolicy cache_policy(bool read_once) {
  CachePolicy first, normal;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(normal));
  return read_once ? first : normal;
}
/// copy_async with a cache policy.
__device__ inline void copy_async(std::uint32_t to, const void* from, bool wanted,
                                  CachePolicy policy) {
  const int bytes = wanted ? 16 : 0;
  asm volatile(
      "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(to),
      "l"(from), "r"(bytes), "l"(policy)
      : "memory");
}
/// Copies 4 bytes from global to shared memory asynchronously.
__device__ inline void copy_word_async(std::uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits until at most kLeft of the newest copy groups of this thread are pending.
template <int kLeft>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}
/// Waits until at most `left` copy groups are pending; 0 <= left <= kMax.
template <int kMax>
__device__ inline void wait_copies(int left) {
  if constexpr (kMax > 0)
    if (left < kMax) return wait_copies<kMax - 1>(left);
  wait_copies<kMax>();
}
/// Prefetches a line of 128 bytes into the L2 cache.
__device__ inline void prefetch_line(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

/// Rows of kRowBytes bytes in shared memory. The 16-byte chunks of a row are permuted, so that the
/// same chunk of eight consecutive rows is in eight different banks.
template <int kRowBytes>
struct Swizzled {
  static constexpr int kChunks = kRowBytes / 16;
  static_assert(kRowBytes % 64 == 0);
  /// Offset in bytes from the start of the tile.
  __device__ static constexpr int offset(int row, int chunk) {
    const int mask = kChunks % 8 == 0 ? row & 7 : (row >> 1) & 3;
    return (row * kChunks + (chunk ^ mask)) * 16;
  }
};

}  // namespace kvlab::kernels
