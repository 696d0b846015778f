// Asynchronous matrix products of a warpgroup (sm_90a), whose second operand is in shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace kvlab::kernels {

/// Rows of up to 64 elements of 2 bytes, in the layout that these products read: 128 bytes per row,
/// whose 16-byte chunks are permuted depending on the row's index. A panel begins at a multiple of
/// 1,024 bytes.
struct Panel {
  static constexpr int kRowBytes = 128, kChunks = kRowBytes / 16;
  /// Offset in bytes from the start of the panel.
  __device__ static constexpr int offset(int row, int chunk) {
    return row * kRowBytes + (chunk ^ (row & 7)) * 16;
  }
  /// The matrix descriptor of the panel at this address in shared memory. It covers each row from
  /// element 16 * column on.
  __device__ static std::uint64_t describe(std::uint32_t address, int column) {
    constexpr std::uint64_t kSwizzle128 = std::uint64_t{1} << 62;
    constexpr std::uint64_t kEightRows = std::uint64_t{8 * kRowBytes / 16} << 32;
    constexpr std::uint64_t kUnused = std::uint64_t{1} << 16;
    return kSwizzle128 | kEightRows | kUnused | ((address + column * 32) >> 4 & 0x3fff);
  }
};

/// c[64 x 64] (+)= a[64 x 16] * b[64 x 16]^T, by four warps. a is in registers. For the 16 rows of
/// each warp and each eight columns, a and c have the layout of multiply_add(). b is the descriptor
/// of a panel. `add`: whether the product is added to c; otherwise it replaces c. Do not access a
/// or c between the call of fence_products() before the product and the wait after it.
template <class T>
__device__ inline void multiply_add_64(float (&c)[32], const std::uint32_t (&a)[4], std::uint64_t b,
                                       bool add);
template <>
__device__ inline void multiply_add_64<__nv_bfloat16>(float (&c)[32], const std::uint32_t (&a)[4],
                                                      std::uint64_t b, bool add) {
  asm volatile(
      "{.reg .pred add;\n"
      "setp.ne.b32 add, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, add, 1, 1, 0;}"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
        "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]),
        "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]),
        "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]),
        "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add ? 1 : 0));
}
template <>
__device__ inline void multiply_add_64<__half>(float (&c)[32], const std::uint32_t (&a)[4],
                                               std::uint64_t b, bool add) {
  asm volatile(
      "{.reg .pred add;\n"
      "setp.ne.b32 add, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, add, 1, 1, 0;}"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
        "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]),
        "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]),
        "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]),
        "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add ? 1 : 0));
}

/// Call it before the products, so that they see all earlier writes to registers and shared memory.
__device__ inline void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits until at most kLeft of the newest product groups are pending.
template <int kLeft>
__device__ inline void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}
/// Call it after a wait. The compiler may not read the results of the products before this point.
template <int kCount>
__device__ inline void take_products(float (&c)[kCount]) {
#pragma unroll
  for (float& value : c) asm volatile("" : "+f"(value)::"memory");
}
/// Makes this thread's earlier reads and writes of shared memory visible to the products and bulk
/// copies that follow this call or the next barrier.
__device__ inline void publish_to_products() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace kvlab::kernels
