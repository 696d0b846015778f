// Sums of values, and distances between outputs.
#pragma once

#include "sim/config_batches/loops/rows/head_groups.hpp"

namespace kvlab {
namespace {

void list_weights(const float* e, const std::uint32_t* tokens, std::size_t count,
                  const std::uint64_t* bits, float* to, float* size) {
  Four all = load_four(size);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t token = tokens[i];
    const float sign = bits[token / 64] >> token % 64 & 1 ? 1.0f : -1.0f;
    const Four one = load_four(e + std::size_t{token} * kHeadGroupSize), weight = one * sign;
    std::memcpy(to + i * kHeadGroupSize, &weight, sizeof weight);
    all += one;
  }
  std::memcpy(size, &all, sizeof all);
}

/// Adds the weighted values of tokens [begin, end) to the sums of H heads. Handles P registers of
/// each sum.
template <int H, int P>
inline void accumulate_columns(const float* weights, const std::uint32_t* tokens, std::size_t begin,
                               std::size_t end, const float* v, std::size_t stride,
                               std::size_t depth, float* y) {
  Floats sum[H][P];
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h)
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) sum[h][p] = load(y + h * depth + p * kWidth);
  for (std::size_t i = begin; i < end; ++i) {
    const float* row = v + (tokens ? tokens[i] : i) * stride;
    Floats column[P];
    for (int p = 0; p < P; ++p) column[p] = load(row + p * kWidth);
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
      // Subtracting zero copies the scalar to all elements. Adding zero would change -0 to 0.
      const Floats factor = weights[i * kHeadGroupSize + static_cast<std::size_t>(h)] - Floats{};
      for (int p = 0; p < P; ++p) sum[h][p] = multiply_add(factor, column[p], sum[h][p]);
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h)
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) store(y + h * depth + p * kWidth, sum[h][p]);
}

/// Adds the weighted values of tokens [begin, end). The range is short, so its values stay in the
/// CPU cache for all columns.
template <int H>
void accumulate_some(const float* weights, const std::uint32_t* tokens, std::size_t begin,
                     std::size_t end, const float* v, std::size_t stride, std::size_t depth,
                     float* y) {
  constexpr int kColumns = kWidth == 4 ? 2 : 4;
  std::size_t d = 0;
  for (; d + kColumns * kWidth <= depth; d += kColumns * kWidth)
    accumulate_columns<H, kColumns>(weights, tokens, begin, end, v + d, stride, depth, y + d);
  for (; d + kWidth <= depth; d += kWidth)
    accumulate_columns<H, 1>(weights, tokens, begin, end, v + d, stride, depth, y + d);
  for (; d < depth; ++d)
    for (int h = 0; h < H; ++h) {
      float sum = y[h * depth + d];
      for (std::size_t i = begin; i < end; ++i)
        sum = fused_float(weights[i * kHeadGroupSize + static_cast<std::size_t>(h)],
                          v[(tokens ? tokens[i] : i) * stride + d], sum);
      y[h * depth + d] = sum;
    }
}

void accumulate_head_group(const float* weights, const std::uint32_t* tokens, std::size_t count,
                           std::size_t heads, const float* v, std::size_t stride, std::size_t depth,
                           float* y) {
  constexpr decltype(&accumulate_some<1>) kByHeads[] = {accumulate_some<1>, accumulate_some<2>,
                                                        accumulate_some<3>, accumulate_some<4>};
  constexpr std::size_t kAtOnce = 128;
  for (std::size_t i = 0; i < count; i += kAtOnce)
    kByHeads[heads - 1](weights, tokens, i, count - i < kAtOnce ? count : i + kAtOnce, v, stride,
                        depth, y);
}

/// Uses sixteen running sums for each gradient sample.
void add_changes(const float* a, const float* b, std::size_t heads, const float* factors,
                 std::size_t count, const float* gradients, std::size_t gradient_samples,
                 float* changes) {
  const std::size_t whole = count / kTokens * kTokens;
  for (std::size_t d = 0; d < gradient_samples; ++d) {
    Floats sum[kPieces] = {};
    double rest = 0;
    for (std::size_t h = 0; h < heads; ++h, gradients += count) {
      const float *full = a + h * count, *kept = b + h * count;
      const float factor = factors[h];
      for (std::size_t i = 0; i < whole; i += kTokens)
        for (int piece = 0; piece < kPieces; ++piece) {
          const std::size_t at = i + static_cast<std::size_t>(piece * kWidth);
          sum[piece] += load(gradients + at) * (factor * load(kept + at) - load(full + at));
        }
      for (std::size_t i = whole; i < count; ++i)
        rest += static_cast<double>(gradients[i]) * static_cast<double>(factor * kept[i] - full[i]);
    }
    const Four four = by_halves(sum, kPieces, [](auto x, auto y) { return x + y; });
    changes[d] +=
        static_cast<float>(static_cast<double>((four[0] + four[2]) + (four[1] + four[3])) + rest);
  }
}

/// Uses sixteen running sums, by index modulo 16, and adds them up pairwise at the end.
double distance2(const float* a, const float* b, float factor, std::size_t count) {
  double lanes[kTokens] = {};
  std::size_t i = 0;
  for (; i + kTokens <= count; i += kTokens)
    for (int l = 0; l < kTokens; ++l) {
      const double x = static_cast<double>(a[i + l]) - static_cast<double>(factor * b[i + l]);
      lanes[l] += x * x;
    }
  for (int l = 0; i < count; ++i, ++l) {
    const double x = static_cast<double>(a[i]) - static_cast<double>(factor * b[i]);
    lanes[l] += x * x;
  }
  for (int width = kTokens / 2; width > 0; width /= 2)
    for (int l = 0; l < width; ++l) lanes[l] += lanes[l + width];
  return lanes[0];
}

}  // namespace
}  // namespace kvlab
