// Quantized values of 8, 4 or 2 bits for rows of keys and values: blocks of 32 channels after the
// Hadamard rotation, each with a scale of its own.
#pragma once

#include <span>

namespace kvlab {

/// y = H x for each block of 32, H the Hadamard matrix of ±1: five rounds of sums and differences,
/// neighbours first. H H x = 32 x.
void hadamard_rotate(std::span<float> row);
void hadamard_rotate(std::span<double> row);

/// Each block of 32 of `row`, after the Hadamard rotation, to what is read back after quantization.
/// Whole numbers of `bits`: with mn16 = fp16(least), s16 = fp16((most - least) / (2^bits - 1)), the
/// next fp16 above 0 if that is 0, an element y becomes clamp(rint((y - mn16) / s16), 0, 2^bits -
/// 1) * s16 + mn16. `floating`: e4m3 times the least power of two under which all fit. Throws
/// std::invalid_argument where a number is too large for fp16.
void quantize_row(std::span<float> row, int bits, bool floating);

}  // namespace kvlab
