// Quantization of keys and values to 8, 4 or 2 bits: in blocks of 32 channels after the Hadamard
// rotation, with one scale per block.
#pragma once

#include <span>

namespace kvlab {

/// y = H x for each block of 32, where H is the Hadamard matrix of ±1: five rounds of sums and
/// differences, neighbours first. H H x = 32 x.
void hadamard_rotate(std::span<float> row);
void hadamard_rotate(std::span<double> row);

/// Replaces each block of 32 of `row`, after the Hadamard rotation, by its quantized and
/// dequantized values. Integers of `bits` bits: let mn16 = fp16(least) and s16 = fp16((most -
/// least) / (2^bits - 1)), or the smallest fp16 above 0 if that is 0; an element y becomes
/// clamp(rint((y - mn16) / s16), 0, 2^bits - 1) * s16 + mn16. `floating`: e4m3 times the smallest
/// power of two under which all elements fit. Throws std::invalid_argument if a number is too large
/// for fp16.
void quantize_row(std::span<float> row, int bits, bool floating);

}  // namespace kvlab
