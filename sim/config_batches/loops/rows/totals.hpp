// Computes, for a live set, the sum of its tokens' exponentials, and the number of its tokens that
// are requested (hits). The order of the additions differs from that of a decoder.
#pragma once

#include "sim/config_batches/loops/rows/gathering.hpp"

namespace kvlab {
namespace {

inline FourInts over_tokens(Ints v) {
  FourInts parts[kHeadGroups];
  std::memcpy(parts, &v, sizeof v);
  for (int i = 1; i < kHeadGroups; ++i) parts[0] += parts[i];
  return parts[0];
}

/// Adds whole blocks to sums and hits. Consecutive tokens are loaded together. Returns the number
/// of tokens in whole blocks.
inline std::size_t total_blocks(const float* e, const std::uint32_t* tokens, std::size_t count,
                                const float* request_threshold, Four& sum, FourInts& hits) {
  if (count < kBlockTokens) return 0;
  const Floats bound = broadcast_four(request_threshold);
  Floats sums[kBlockParts] = {};
  Ints requested[2] = {};
  std::size_t i = 0;
  for (; i + kBlockTokens <= count; i += kBlockTokens) {
    const bool run = !tokens || tokens[i + kBlockTokens - 1] - tokens[i] == kBlockTokens - 1;
    const float* const from = e + (tokens ? std::size_t{tokens[i]} : i) * kHeadGroupSize;
    for (int part = 0; part < kBlockParts; ++part) {
      const Floats x =
          run ? load(from + part * kWidth) : load_scattered(e, tokens + i + part * kHeadGroups);
      sums[part] += x;
      requested[part % 2] -= x >= bound;
    }
  }
  sum = by_halves(sums, kBlockParts, [](auto a, auto b) { return a + b; });
  hits = over_tokens(requested[0] + requested[1]);
  return i;
}

void total(const float* e, const std::uint32_t* tokens, std::size_t count,
           const float* request_threshold, float* sum, std::uint32_t* hits) {
  Four all = {};
  FourInts requested = {};
  std::size_t i = total_blocks(e, tokens, count, request_threshold, all, requested);
  const Four bound = load_four(request_threshold);
  for (; i < count; ++i) {
    const Four one = load_four(e + std::size_t{tokens ? tokens[i] : i} * kHeadGroupSize);
    all += one;
    requested -= one >= bound;
  }
  for (int h = 0; h < kHeads; ++h) {
    sum[h] = all[h];
    hits[h] += static_cast<std::uint32_t>(requested[h]);
  }
}

}  // namespace
}  // namespace kvlab
