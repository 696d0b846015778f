// Codes of a key or value on the device, bit for bit those of traces/base/numeric/code.cpp: a warp
// has a row, lane l its channels l, kCodeBlock + l, …
#pragma once

#include <cuda_fp8.h>

#include "kernels/codes/coded_cache.hpp"
#include "kernels/device/element.cuh"
#include "kernels/device/reduce.cuh"

namespace kvlab::kernels {

inline constexpr int kMostBlocks = 8;  ///< of a row
static_assert(kCodeBlock == kWarpSize);

/// A row in the registers of a warp.
struct CodedRow {
  float y[kMostBlocks];  ///< what is read, behind the butterflies or, uncoded, before
  std::uint32_t code[kMostBlocks], metadata[kMostBlocks];
};

__device__ inline int code_lane() { return static_cast<int>(threadIdx.x) % kWarpSize; }

/// As butterflies() of a block.
__device__ inline float butterfly(float x) {
#pragma unroll
  for (int apart = 1; apart < kWarpSize; apart *= 2) {
    const float other = __shfl_xor_sync(~0u, x, apart);
    x = (code_lane() & apart) == 0 ? x + other : other - x;
  }
  return x;
}
__device__ inline void butterflies(CodedRow& row, int blocks) {
#pragma unroll
  for (int b = 0; b < kMostBlocks; ++b)
    if (b < blocks) row.y[b] = butterfly(row.y[b]);
}

/// 2^exponent, -149 <= exponent <= 127.
__device__ inline float power_of_two(int exponent) { return ldexpf(1.0f, exponent); }

__device__ inline float decoded_whole(std::uint32_t code, std::uint32_t metadata) {
  const float scale = __half2float(__ushort_as_half(static_cast<unsigned short>(metadata))),
              least = __half2float(__ushort_as_half(static_cast<unsigned short>(metadata >> 16)));
  return __fadd_rn(__fmul_rn(static_cast<float>(code), scale), least);
}
__device__ inline float decoded_floating(std::uint32_t code, std::uint32_t metadata) {
  const __half value(__nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(code), __NV_E4M3));
  return __fmul_rn(__half2float(value), power_of_two(static_cast<int>(metadata) - 127));
}
__device__ inline float decoded(bool floating, std::uint32_t code, std::uint32_t metadata) {
  return floating ? decoded_floating(code, metadata) : decoded_whole(code, metadata);
}

/// As round_to_e4m3 there; |y| <= 448.
__device__ inline float round_to_e4m3(float y) {
  int exponent;
  frexpf(y, &exponent);
  const float step = power_of_two(max(exponent - 1, -6) - 3);
  return __fmul_rn(rintf(__fdiv_rn(y, step)), step);
}

__device__ inline void code_floating(float y, std::uint32_t& code, std::uint32_t& metadata) {
  constexpr float kLargest = 448;
  const float largest = warp_max(fabsf(y));
  int exponent = -127;
  if (largest > 0 && frexpf(__fdiv_rn(largest, kLargest), &exponent) == 0.5f) --exponent;
  exponent = min(max(exponent, -127), 127);
  const float rounded = round_to_e4m3(__fdiv_rn(y, power_of_two(exponent)));
  code = __nv_cvt_float_to_fp8(rounded, __NV_SATFINITE, __NV_E4M3);
  metadata = static_cast<std::uint32_t>(exponent + 127);
}

__device__ inline void code_whole(float y, int bits, std::uint32_t& code, std::uint32_t& metadata) {
  const float most = warp_max(y), least = -warp_max(-y);
  const auto codes = static_cast<float>((1 << bits) - 1);
  const __half minimum = __float2half_rn(least);
  __half scale = __float2half_rn(__fdiv_rn(__fsub_rn(most, least), codes));
  if (__half2float(scale) == 0) scale = __ushort_as_half(1);
  const float at = __fdiv_rn(__fsub_rn(y, __half2float(minimum)), __half2float(scale));
  code = static_cast<std::uint32_t>(fminf(fmaxf(rintf(at), 0.0f), codes));
  metadata = std::uint32_t{__half_as_ushort(scale)} | std::uint32_t{__half_as_ushort(minimum)}
                                                          << 16;
}

/// As code_row().
__device__ inline void code_row(CodedRow& row, int bits, bool floating, int blocks) {
#pragma unroll
  for (int b = 0; b < kMostBlocks; ++b) {
    if (b >= blocks) break;
    if (floating)
      code_floating(row.y[b], row.code[b], row.metadata[b]);
    else
      code_whole(row.y[b], bits, row.code[b], row.metadata[b]);
    row.y[b] = decoded(floating, row.code[b], row.metadata[b]);
  }
}

/// A lane's metadata of a block.
__device__ inline std::uint32_t load_metadata(const std::byte* metadata, bool floating, int block) {
  return floating ? std::uint32_t{reinterpret_cast<const std::uint8_t*>(metadata)[block]}
                  : reinterpret_cast<const std::uint32_t*>(metadata)[block];
}
__device__ inline std::uint32_t load_code(const RowPart& from, bool key, int bits, int channel,
                                          int blocks) {
  const int bit = code_bit(key, bits, from.row, channel, blocks);
  const auto byte = reinterpret_cast<const std::uint8_t*>(from.codes)[bit / 8];
  return byte >> bit % 8 & ((1u << bits) - 1);
}

__device__ inline void load_codes(CodedRow& row, const RowPart& from, const DeviceForm& form,
                                  bool key, int blocks) {
#pragma unroll
  for (int b = 0; b < kMostBlocks; ++b) {
    if (b >= blocks) break;
    row.metadata[b] = load_metadata(from.metadata, form.floating, b);
    row.code[b] = load_code(from, key, form.bits(key), b * kWarpSize + code_lane(), blocks);
    row.y[b] = decoded(form.floating, row.code[b], row.metadata[b]);
  }
}

/// A lane's code of block `b`, and the block's metadata.
__device__ inline void store_code(std::uint32_t code, std::uint32_t metadata, const RowPart& to,
                                  const DeviceForm& form, bool key, int b, int blocks) {
  const int bits = form.bits(key),
            bit = code_bit(key, bits, to.row, b * kWarpSize + code_lane(), blocks);
  std::uint32_t byte = code << bit % 8;  // with those of the lanes beside it
  for (int apart = 1; apart < 8 / bits; apart *= 2) byte |= __shfl_xor_sync(~0u, byte, apart);
  if (bit % 8 == 0) reinterpret_cast<std::uint8_t*>(to.codes)[bit / 8] = byte;
  if (code_lane() != 0) return;
  if (form.floating)
    reinterpret_cast<std::uint8_t*>(to.metadata)[b] = metadata;
  else
    reinterpret_cast<std::uint32_t*>(to.metadata)[b] = metadata;
}
__device__ inline void store_codes(const CodedRow& row, const RowPart& to, const DeviceForm& form,
                                   bool key, int blocks) {
#pragma unroll
  for (int b = 0; b < kMostBlocks; ++b)
    if (b < blocks) store_code(row.code[b], row.metadata[b], to, form, key, b, blocks);
}

template <class T>
__device__ void load_exact(CodedRow& row, const T* from, int blocks) {
#pragma unroll
  for (int b = 0; b < kMostBlocks; ++b)
    if (b < blocks) row.y[b] = to_float(from[b * kWarpSize + code_lane()]);
}
template <class T>
__device__ void store_exact(const CodedRow& row, T* to, int blocks) {
#pragma unroll
  for (int b = 0; b < kMostBlocks; ++b)
    if (b < blocks) to[b * kWarpSize + code_lane()] = from_float<T>(row.y[b]);
}

/// Takes a row from a rung, or -1: as computed, down to another, as way_down() says.
__device__ inline void step_down(CodedRow& row, const DeviceLadder& ladder, int from, int to,
                                 bool key, int blocks) {
  bool coded = from >= 0 && !ladder.rung[from].form.exact();
  for (int r = from + 1; r <= to; ++r) {
    const DeviceForm form = ladder.rung[r].form;
    if (form == (r == 0 ? DeviceForm{} : ladder.rung[r - 1].form)) continue;
    if (!coded) butterflies(row, blocks);
    coded = true;
    code_row(row, form.bits(key), form.floating, blocks);
  }
}

template <class T>
__device__ void load_part(CodedRow& row, const RowPart& from, const DeviceForm& form, bool key,
                          int blocks) {
  if (form.exact())
    load_exact(row, reinterpret_cast<const T*>(from.codes), blocks);
  else
    load_codes(row, from, form, key, blocks);
}
template <class T>
__device__ void store_part(const CodedRow& row, const RowPart& to, const DeviceForm& form, bool key,
                           int blocks) {
  if (form.exact())
    store_exact(row, reinterpret_cast<T*>(to.codes), blocks);
  else
    store_codes(row, to, form, key, blocks);
}

}  // namespace kvlab::kernels
