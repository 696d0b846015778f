// Gathers and sums a live set's exponentials.
#pragma once

#include "sim/config_batches/loops/rows/head_groups.hpp"

namespace kvlab {
namespace {

/// Running sums and maxima of a head group, [token % 16][4].
struct HeadGroupSums {
  /// Number of registers of maxima.
  static constexpr int kNumMaxima = kBlockParts < 4 ? kBlockParts : 4;
  Floats sum[kBlockParts], maxima[kNumMaxima];

  inline __attribute__((always_inline)) HeadGroupSums() {
    for (Floats& part : sum) part = Floats{};
    for (Floats& part : maxima) part = Floats{};
  }
  /// Continues from stored sums and maxima, [16][4].
  inline __attribute__((always_inline)) HeadGroupSums(const float* lanes, const float* largest) {
    for (int i = 0; i < kBlockParts; ++i) sum[i] = load(lanes + i * kWidth);
    for (int i = 0; i < kNumMaxima; ++i) maxima[i] = load(largest + i * kWidth);
  }
  inline __attribute__((always_inline)) void add(int part, Floats e) {
    sum[part] += e;
    maxima[part % kNumMaxima] = greater(e, maxima[part % kNumMaxima]);
  }
  inline __attribute__((always_inline)) void add_block(const float* block) {
    for (int i = 0; i < kBlockParts; ++i) add(i, load(block + i * kWidth));
  }
  inline __attribute__((always_inline)) void store_to(float* lanes, float* largest) const {
    for (int i = 0; i < kBlockParts; ++i) store(lanes + i * kWidth, sum[i]);
    for (int i = 0; i < kNumMaxima; ++i) store(largest + i * kWidth, maxima[i]);
  }
  bool any_at_least(float bound) const;
  /// Computes one sum and one maximum for each head.
  void finish(float* to_sum, float* to_max) const {
    store_sums(sum, to_sum);
    Floats all_maxima[kNumMaxima];
    std::memcpy(all_maxima, maxima, sizeof all_maxima);
    const Four largest =
        by_halves(all_maxima, kNumMaxima, [](auto a, auto b) { return a > b ? a : b; });
    std::memcpy(to_max, &largest, sizeof largest);
  }
};

/// Writes zeros from token `count` to the end of its block.
inline void pad(float* rows, std::size_t count) {
  const std::size_t rest = (kBlockTokens - count % kBlockTokens) % kBlockTokens;
  std::memset(rows + count * kHeadGroupSize, 0, rest * kHeadGroupSize * sizeof(float));
}

/// Copies exponentials, pads them with zeros to whole blocks, and adds them to `sums`.
inline void copy_blocks(const float* e, std::size_t count, float* to, HeadGroupSums& sums) {
  std::size_t i = 0;
  for (; i + kBlockTokens <= count; i += kBlockTokens)
    for (int part = 0; part < kBlockParts; ++part) {
      const Floats x = load(e + i * kHeadGroupSize + part * kWidth);
      store(to + i * kHeadGroupSize + part * kWidth, x);
      sums.add(part, x);
    }
  if (i == count) return;
  if (i < count)
    std::memcpy(to + i * kHeadGroupSize, e + i * kHeadGroupSize,
                (count - i) * kHeadGroupSize * sizeof(float));
  pad(to, count);
  sums.add_block(to + i * kHeadGroupSize);
}

/// Whether the sixteen tokens from tokens[0] on are consecutive.
inline bool follow(const std::uint32_t* tokens) {
  return tokens[kBlockTokens - 1] - tokens[0] == kBlockTokens - 1;
}

/// Loads one register of a block's exponentials. `run`: whether the tokens of the block are
/// consecutive.
inline __attribute__((always_inline)) Floats load_part(const float* e, const std::uint32_t* tokens,
                                                       bool run, int part) {
  return run ? load(e + std::size_t{tokens[0]} * kHeadGroupSize + part * kWidth)
             : load_scattered(e, tokens + part * kHeadGroups);
}

/// Copies less than a block of tokens, and pads it with zeros.
inline void copy_rest(const float* e, const std::uint32_t* tokens, std::size_t count, float* kept) {
  for (std::size_t j = 0; j < count; ++j)
    std::memcpy(kept + j * kHeadGroupSize, e + std::size_t{tokens[j]} * kHeadGroupSize,
                kHeadGroupSize * sizeof(float));
  pad(kept, count);
}

void gather(const float* e, const std::uint32_t* tokens, std::size_t count, float* kept, float* sum,
            float* max_exponential) {
  HeadGroupSums all;
  std::size_t i = 0;
  for (; i + kBlockTokens <= count; i += kBlockTokens) {
    const bool run = follow(tokens + i);
    for (int part = 0; part < kBlockParts; ++part) {
      const Floats x = load_part(e, tokens + i, run, part);
      store(kept + i * kHeadGroupSize + part * kWidth, x);
      all.add(part, x);
    }
  }
  if (i < count) {
    copy_rest(e, tokens + i, count - i, kept + i * kHeadGroupSize);
    all.add_block(kept + i * kHeadGroupSize);
  }
  all.finish(sum, max_exponential);
}

}  // namespace
}  // namespace kvlab
