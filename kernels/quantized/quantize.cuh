// Quantization of a key or value on the device, equal bit for bit to
// traces/base/numeric/quantize.cpp. A row is one key or one value. A warp handles a row; lane l has
// channels l, kQuantBlock + l, 2 * kQuantBlock + l, …
#pragma once

#include <cuda_fp8.h>

#include "kernels/device/element.cuh"
#include "kernels/device/reduce.cuh"
#include "kernels/quantized/quantized_cache.hpp"

namespace kvlab::kernels {

inline constexpr int kMaxBlocks = 8;  ///< maximum number of blocks of a row
static_assert(kQuantBlock == kWarpSize);

/// A row in the registers of a warp.
struct QuantizedRow {
  float y[kMaxBlocks];  ///< this lane's channel of each block. If the row is quantized, these are
                        ///< the dequantized numbers, still rotated; otherwise the original numbers
  std::uint32_t quantized[kMaxBlocks], metadata[kMaxBlocks];
};

__device__ inline int lane_id() { return static_cast<int>(threadIdx.x) % kWarpSize; }

/// The Hadamard rotation of a block, as in quantize.cpp.
__device__ inline float hadamard_rotate_block(float x) {
#pragma unroll
  for (int apart = 1; apart < kWarpSize; apart *= 2) {
    const float other = __shfl_xor_sync(~0u, x, apart);
    x = (lane_id() & apart) == 0 ? x + other : other - x;
  }
  return x;
}
__device__ inline void hadamard_rotate(QuantizedRow& row, int blocks) {
#pragma unroll
  for (int b = 0; b < kMaxBlocks; ++b)
    if (b < blocks) row.y[b] = hadamard_rotate_block(row.y[b]);
}

/// 2^exponent. Requires -149 <= exponent <= 127.
__device__ inline float power_of_two(int exponent) { return ldexpf(1.0f, exponent); }

__device__ inline float dequantize_int(std::uint32_t quantized, std::uint32_t metadata) {
  const float scale = __half2float(__ushort_as_half(static_cast<unsigned short>(metadata))),
              minimum = __half2float(__ushort_as_half(static_cast<unsigned short>(metadata >> 16)));
  return __fadd_rn(__fmul_rn(static_cast<float>(quantized), scale), minimum);
}
__device__ inline float dequantize_fp8(std::uint32_t quantized, std::uint32_t metadata) {
  const __half value(
      __nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(quantized), __NV_E4M3));
  return __fmul_rn(__half2float(value), power_of_two(static_cast<int>(metadata) - 127));
}
__device__ inline float dequantize(bool floating, std::uint32_t quantized, std::uint32_t metadata) {
  return floating ? dequantize_fp8(quantized, metadata) : dequantize_int(quantized, metadata);
}

/// Returns the same bits as round_to_e4m3() in quantize.cpp. Requires |y| <= 448.
__device__ inline float round_to_e4m3(float y) {
  int exponent;
  frexpf(y, &exponent);
  const float step = power_of_two(max(exponent - 1, -6) - 3);
  return __fmul_rn(rintf(__fdiv_rn(y, step)), step);
}

__device__ inline void quantize_fp8(float y, std::uint32_t& quantized, std::uint32_t& metadata) {
  constexpr float kLargest = 448;
  const float largest = warp_max(fabsf(y));
  int exponent = -127;
  if (largest > 0 && frexpf(__fdiv_rn(largest, kLargest), &exponent) == 0.5f) --exponent;
  exponent = min(max(exponent, -127), 127);
  const float rounded = round_to_e4m3(__fdiv_rn(y, power_of_two(exponent)));
  quantized = __nv_cvt_float_to_fp8(rounded, __NV_SATFINITE, __NV_E4M3);
  metadata = static_cast<std::uint32_t>(exponent + 127);
}

__device__ inline void quantize_int(float y, int bits, std::uint32_t& quantized,
                                    std::uint32_t& metadata) {
  const float highest = warp_max(y), lowest = -warp_max(-y);
  const auto levels = static_cast<float>((1 << bits) - 1);
  const __half minimum = __float2half_rn(lowest);
  __half scale = __float2half_rn(__fdiv_rn(__fsub_rn(highest, lowest), levels));
  if (__half2float(scale) == 0) scale = __ushort_as_half(1);
  const float at = __fdiv_rn(__fsub_rn(y, __half2float(minimum)), __half2float(scale));
  quantized = static_cast<std::uint32_t>(fminf(fmaxf(rintf(at), 0.0f), levels));
  metadata = std::uint32_t{__half_as_ushort(scale)} | std::uint32_t{__half_as_ushort(minimum)}
                                                          << 16;
}

/// Quantizes row.y, and replaces it by the dequantized numbers, as quantize_row() in quantize.cpp.
__device__ inline void quantize_row(QuantizedRow& row, int bits, bool floating, int blocks) {
#pragma unroll
  for (int b = 0; b < kMaxBlocks; ++b) {
    if (b >= blocks) break;
    if (floating)
      quantize_fp8(row.y[b], row.quantized[b], row.metadata[b]);
    else
      quantize_int(row.y[b], bits, row.quantized[b], row.metadata[b]);
    row.y[b] = dequantize(floating, row.quantized[b], row.metadata[b]);
  }
}

/// Reads the metadata of a block.
__device__ inline std::uint32_t load_metadata(const std::byte* metadata, bool floating, int block) {
  return floating ? std::uint32_t{reinterpret_cast<const std::uint8_t*>(metadata)[block]}
                  : reinterpret_cast<const std::uint32_t*>(metadata)[block];
}
__device__ inline std::uint32_t load_quantized(const RowPart& from, bool key, int bits, int channel,
                                               int blocks) {
  const int bit = quantized_bit(key, bits, from.row, channel, blocks);
  const auto byte = reinterpret_cast<const std::uint8_t*>(from.data)[bit / 8];
  return byte >> bit % 8 & ((1u << bits) - 1);
}

__device__ inline void load_quantized_row(QuantizedRow& row, const RowPart& from,
                                          const DeviceFormat& format, bool key, int blocks) {
#pragma unroll
  for (int b = 0; b < kMaxBlocks; ++b) {
    if (b >= blocks) break;
    row.metadata[b] = load_metadata(from.metadata, format.floating, b);
    row.quantized[b] =
        load_quantized(from, key, format.bits(key), b * kWarpSize + lane_id(), blocks);
    row.y[b] = dequantize(format.floating, row.quantized[b], row.metadata[b]);
  }
}

/// Stores this lane's quantized value of block `b`, and the block's metadata.
__device__ inline void store_quantized(std::uint32_t quantized, std::uint32_t metadata,
                                       const RowPart& to, const DeviceFormat& format, bool key,
                                       int b, int blocks) {
  const int bits = format.bits(key),
            bit = quantized_bit(key, bits, to.row, b * kWarpSize + lane_id(), blocks);
  std::uint32_t byte =
      quantized << bit % 8;  // the loop adds the numbers of the other lanes that share the byte
  for (int apart = 1; apart < 8 / bits; apart *= 2) byte |= __shfl_xor_sync(~0u, byte, apart);
  if (bit % 8 == 0) reinterpret_cast<std::uint8_t*>(to.data)[bit / 8] = byte;
  if (lane_id() != 0) return;
  if (format.floating)
    reinterpret_cast<std::uint8_t*>(to.metadata)[b] = metadata;
  else
    reinterpret_cast<std::uint32_t*>(to.metadata)[b] = metadata;
}
__device__ inline void store_quantized_row(const QuantizedRow& row, const RowPart& to,
                                           const DeviceFormat& format, bool key, int blocks) {
#pragma unroll
  for (int b = 0; b < kMaxBlocks; ++b)
    if (b < blocks) store_quantized(row.quantized[b], row.metadata[b], to, format, key, b, blocks);
}

template <class T>
__device__ void load_exact(QuantizedRow& row, const T* from, int blocks) {
#pragma unroll
  for (int b = 0; b < kMaxBlocks; ++b)
    if (b < blocks) row.y[b] = to_float(from[b * kWarpSize + lane_id()]);
}
template <class T>
__device__ void store_exact(const QuantizedRow& row, T* to, int blocks) {
#pragma unroll
  for (int b = 0; b < kMaxBlocks; ++b)
    if (b < blocks) to[b * kWarpSize + lane_id()] = from_float<T>(row.y[b]);
}

/// Demotes a row from tier `from` (-1: on no tier yet) to tier `to`. As in demotion_path(), the row
/// is quantized to the format of every tier on the way, one after another.
__device__ inline void demote(QuantizedRow& row, const DeviceTierPlan& tier_plan, int from, int to,
                              bool key, int blocks) {
  bool is_quantized = from >= 0 && !tier_plan.tier[from].format.exact();
  for (int r = from + 1; r <= to; ++r) {
    const DeviceFormat format = tier_plan.tier[r].format;
    if (format == (r == 0 ? DeviceFormat{} : tier_plan.tier[r - 1].format)) continue;
    if (!is_quantized) hadamard_rotate(row, blocks);
    is_quantized = true;
    quantize_row(row, format.bits(key), format.floating, blocks);
  }
}

template <class T>
__device__ void load_part(QuantizedRow& row, const RowPart& from, const DeviceFormat& format,
                          bool key, int blocks) {
  if (format.exact())
    load_exact(row, reinterpret_cast<const T*>(from.data), blocks);
  else
    load_quantized_row(row, from, format, key, blocks);
}
template <class T>
__device__ void store_part(const QuantizedRow& row, const RowPart& to, const DeviceFormat& format,
                           bool key, int blocks) {
  if (format.exact())
    store_exact(row, reinterpret_cast<T*>(to.data), blocks);
  else
    store_quantized_row(row, to, format, key, blocks);
}

}  // namespace kvlab::kernels
