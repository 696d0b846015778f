// Quantization of rows of keys and values: kvlab's formats, in blocks of 32 channels after the
// Hadamard rotation, and formats of other engines. Each function replaces the elements of a row by
// their quantized and dequantized values, and throws std::invalid_argument for NaN and for numbers
// that the format's scale cannot hold.
#pragma once

#include <cstddef>
#include <span>

namespace kvlab {

/// Replaces each block x of 32 elements by H x, where H is the Hadamard matrix of ±1, so H H x = 32
/// x. Computes five rounds of sums and differences: first of neighbours, then of elements that are
/// 2, 4, 8 and 16 apart.
void hadamard_rotate(std::span<float> row);
void hadamard_rotate(std::span<double> row);

/// Replaces each block x of `block` elements by H x / sqrt(block), where H is the Hadamard matrix
/// of ±1. A second call undoes the first. llama.cpp rotates rows in this way before it quantizes
/// them. `block` must be a power of two that divides the size of the row.
void hadamard_rotate_orthonormal(std::span<float> row, std::size_t block);

/// Quantizes a row in one of kvlab's formats, in blocks of 32 elements. The Hadamard rotation must
/// have been applied to the row.
///
/// Without `floating`, elements become integers of `bits` bits with a scale s16 and a minimum mn16.
/// Let lowest and highest be the block's smallest and largest element. Then mn16 = fp16(lowest),
/// and s16 = fp16((highest - lowest) / (2^bits - 1)); if this is 0, s16 is the smallest fp16 number
/// above 0. An element y becomes clamp(rint((y - mn16) / s16), 0, 2^bits - 1) * s16 + mn16.
///
/// With `floating`, elements become e4m3 numbers with one scale: the smallest power of two with
/// which all elements of the block fit e4m3.
void quantize_row(std::span<float> row, int bits, bool floating);

/// e4m3 with scale 1, rounded to nearest even; magnitudes above 448 become 448. vLLM and
/// TensorRT-LLM store this format as fp8.
void quantize_e4m3(std::span<float> row);

/// GGML's q8_0, q5_0 and q4_0: blocks of 32 with one fp16 scale.
void quantize_ggml(std::span<float> row, int bits);
/// GGML's q5_1 and q4_1: blocks of 32 with an fp16 scale and an fp16 minimum.
void quantize_ggml_min(std::span<float> row, int bits);

/// NVIDIA's nvfp4 with scale 1 for the tensor: e2m1 in blocks of 16 with one e4m3 scale, which is
/// the largest magnitude divided by 6.
void quantize_nvfp4(std::span<float> row);

/// optimum-quanto's qint4 and qint2 with its MaxOptimizer, on float32: groups of 64 elements with a
/// scale and a minimum in float32. Also throws std::invalid_argument for infinite elements, and for
/// a row whose size is not a multiple of 64, because quanto's groups would span several rows.
void quantize_quanto(std::span<float> row, int bits);

}  // namespace kvlab
