// Sums and hits of live sets. Sums are added in an order that differs from a decoder's.
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
                                const float* least, Four& sum, FourInts& hits) {
  if (count < kBlockTokens) return 0;
  const Floats bound = broadcast_four(least);
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

void total(const float* e, const std::uint32_t* tokens, std::size_t count, const float* least,
           float* sum, std::uint32_t* hits) {
  Four all = {};
  FourInts requested = {};
  std::size_t i = total_blocks(e, tokens, count, least, all, requested);
  const Four bound = load_four(least);
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

/// Loads fewer than kHeadGroups tokens, padded with zeros.
inline __attribute__((always_inline)) Floats load_few(const float* e, const std::uint32_t* tokens,
                                                      std::size_t count) {
  static constexpr float kNothing[kHeadGroupSize] = {};
  const auto at = [&](std::size_t i) {
    return i < count ? e + std::size_t{tokens[i]} * kHeadGroupSize : kNothing;
  };
  if constexpr (kHeadGroups == 4) return load_head_groups(at(0), at(1), at(2), kNothing);
  return load_head_groups(at(0), kNothing, nullptr, nullptr);
}

/// Computes the sums of a list's tokens, as sixteen running sums that are added by halves, and
/// their hits. (Parts are numbered by constants, because otherwise they would not stay in
/// registers.)
inline __attribute__((always_inline)) Four list_totals(const float* e, const std::uint32_t* tokens,
                                                       std::size_t count, Floats bound,
                                                       FourInts& hits) {
  Floats sums[kBlockParts] = {};
  Ints requested[2] = {};
  const auto add = [&](int part, Floats x) {
    sums[part] += x;
    requested[part % 2] -= x >= bound;
  };
  std::size_t i = 0;
  for (; i + kBlockTokens <= count; i += kBlockTokens) {
    const bool run = follow(tokens + i);
#pragma GCC unroll 16
    for (int part = 0; part < kBlockParts; ++part) add(part, load_part(e, tokens + i, run, part));
  }
#pragma GCC unroll 16
  for (int part = 0; part < kBlockParts; ++part) {
    const std::size_t at = i + static_cast<std::size_t>(part * kHeadGroups);
    if (at + kHeadGroups <= count)
      add(part, load_scattered(e, tokens + at));
    else if (at < count)
      add(part, load_few(e, tokens + at, count - at));
  }
  hits = over_tokens(requested[0] + requested[1]);
  return by_halves(sums, kBlockParts, [](auto a, auto b) { return a + b; });
}

void run_totals(const float* e, const std::uint32_t* tokens, const std::size_t* begins,
                std::size_t lists, std::size_t unseen, const float* least, std::size_t stride,
                double* sums, std::uint32_t* hits) {
  const Floats bound = broadcast_four(least);
  const FourInts zero_asks = load_four(least) <= Four{};  // -1: padding counts as requested
  FourDoubles sum = {};
  FourInts requested = {};
  for (std::size_t l = 0; l < lists; ++l) {
    const std::size_t count = begins[l + 1] - begins[l] - (l == 0 ? unseen : 0);
    if (count > 0) {
      FourInts own;
      sum += __builtin_convertvector(list_totals(e, tokens + begins[l], count, bound, own),
                                     FourDoubles);
      const auto padding =
          static_cast<std::int32_t>((kHeadGroups - count % kHeadGroups) % kHeadGroups);
      requested += own + zero_asks * padding;
    }
    std::memcpy(sums + l * stride, &sum, sizeof sum);
    std::memcpy(hits + l * stride, &requested, sizeof requested);
  }
}

}  // namespace
}  // namespace kvlab
