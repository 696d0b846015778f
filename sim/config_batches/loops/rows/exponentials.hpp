// Converts logits to the exponentials of a row.
#pragma once

#include "sim/config_batches/loops/rows/masses.hpp"
#include "traces/base/numeric/exponential.hpp"

namespace kvlab {
namespace {

/// The shift of a row of scaled logits.
inline std::int32_t shift_of(const float* logits, std::size_t count, float scale) {
  float max_logit = -__builtin_inff();
  std::size_t i = 0;
  if (count >= kWidth) {
    Floats best = load(logits) * scale;
    for (i = kWidth; i + kWidth <= count; i += kWidth)
      best = greater(load(logits + i) * scale, best);
    max_logit = largest_of(best);
  }
  for (; i < count; ++i) max_logit = logits[i] * scale > max_logit ? logits[i] * scale : max_logit;
  return shift_below(max_logit);
}

/// Converts kWidth logits of the first H heads, from rows[h] + first on, to exponentials
/// [token][4].
template <int H>
inline __attribute__((always_inline)) void take_exponentials(const float* const* rows,
                                                             std::size_t first, float scale,
                                                             const std::int32_t* shift, Floats* r) {
  Floats logits[H], e[H];
  for (int h = 0; h < H; ++h) logits[h] = load(rows[h] + first) * scale;
  exponentials_of<H>(logits, shift, e);
  for (int h = 0; h < kHeads; ++h) r[h] = h < H ? deinterleave(e[h]) : Floats{};
  transpose(r);
}

/// Converts whole blocks of logits to exponentials e [count][4], and adds these to `sums`.
template <int H>
void write_blocks(const float* const* rows, std::size_t count, float scale,
                  const std::int32_t* shift, float* e, HeadGroupSums& sums) {
  HeadGroupSums all = sums;
  std::int32_t shifts[H];
  for (int h = 0; h < H; ++h) shifts[h] = shift[h];
  for (std::size_t i = 0; i < count; i += kBlockTokens)
    for (int piece = 0; piece < kPieces; ++piece) {
      Floats r[kHeads];
      const std::size_t at = i + static_cast<std::size_t>(piece * kWidth);
      take_exponentials<H>(rows, at, scale, shifts, r);
      for (int j = 0; j < kHeads; ++j) {
        store(e + at * kHeadGroupSize + j * kWidth, r[j]);
        all.add(piece * kHeads + j, r[j]);
      }
    }
  sums = all;
}

void write_blocks(const float* const* rows, std::size_t count, float scale,
                  const std::int32_t* shift, float* e, HeadGroupSums& sums) {
  constexpr decltype(&write_blocks<1>) kByHeads[] = {write_blocks<1>, write_blocks<2>,
                                                     write_blocks<3>, write_blocks<4>};
  int heads = 1;
  while (heads < kHeads && rows[heads]) ++heads;
  kByHeads[heads - 1](rows, count, scale, shift, e, sums);
}

/// Writes the exponentials of less than a block of tokens, padded with zeros.
inline void write_rest(const float* const* rows, std::size_t count, float scale,
                       const std::int32_t* shift, float* e) {
  float rest[kHeadGroupSize][kTokens] = {}, last[kBlockFloats];
  const float* parts[kHeadGroupSize] = {};
  for (int h = 0; h < kHeads; ++h) {
    if (!rows[h]) continue;
    std::memcpy(rest[h], rows[h], count * sizeof(float));
    parts[h] = rest[h];
  }
  HeadGroupSums unused;
  write_blocks(parts, kBlockTokens, scale, shift, last, unused);
  std::memcpy(e, last, count * kHeadGroupSize * sizeof(float));
  pad(e, count);
}

/// Converts `count` logits of each head to exponentials e [count][4], padded to whole blocks, and
/// adds these to `sums`.
inline void write_exponentials(const float* const* rows, std::size_t count, float scale,
                               const std::int32_t* shift, float* e, HeadGroupSums& sums) {
  const std::size_t whole = count / kBlockTokens * kBlockTokens;
  write_blocks(rows, whole, scale, shift, e, sums);
  if (whole == count) return;
  const float* rest[kHeadGroupSize] = {};
  for (int h = 0; h < kHeads; ++h) rest[h] = rows[h] ? rows[h] + whole : nullptr;
  write_rest(rest, count - whole, scale, shift, e + whole * kHeadGroupSize);
  sums.add_block(e + whole * kHeadGroupSize);
}

constexpr float kMaxExponential = 0x1p30f;

/// Divides a head's exponentials by 2^by. Results below 2^-126 become 0.
void lower(HeadGroupRow& row, int head, std::int32_t by) {
  const float factor = by > 126 ? 0.0f
                                : 1.0f / static_cast<float>(std::uint64_t{1} << by / 2) /
                                      static_cast<float>(std::uint64_t{1} << (by - by / 2));
  const auto lower = [factor](float x) { return x * factor < 0x1p-126f ? 0.0f : x * factor; };
  float* const e = row.e + head;
  for (std::size_t i = 0; i < row.tokens; ++i) e[i * kHeadGroupSize] = lower(e[i * kHeadGroupSize]);
  for (std::size_t i = 0; i < kBlockTokens; ++i) {
    row.lanes[i * kHeadGroupSize + static_cast<std::size_t>(head)] *= factor;
    row.largest[i * kHeadGroupSize + static_cast<std::size_t>(head)] *= factor;
  }
}

/// If the new logits need a larger shift for a head, raises its shift and scales the row's
/// exponentials down.
void raise_shifts(HeadGroupRow& row, const float* const* logits, std::size_t count, float scale) {
  for (int h = 0; h < kHeads; ++h) {
    if (!logits[h]) continue;
    const std::int32_t shift = shift_of(logits[h], count, scale);
    if (row.tokens > 0 && shift <= row.shift[h]) continue;
    if (row.tokens > 0) lower(row, h, shift - row.shift[h]);
    row.shift[h] = shift;
  }
}

void extend(HeadGroupRow& row, const float* const* logits, std::size_t count, float scale) {
  if (row.tokens == 0) raise_shifts(row, logits, count, scale);
  for (bool again = false;; again = true) {
    HeadGroupSums sums(row.lanes, row.largest);
    write_exponentials(logits, count, scale, row.shift, row.e + row.tokens * kHeadGroupSize, sums);
    if (again || !sums.any_at_least(kMaxExponential)) {
      sums.store_to(row.lanes, row.largest);
      break;
    }
    raise_shifts(row, logits, count, scale);
  }
  row.tokens += count;
}

void finish(const HeadGroupRow& row, float* sum, float* max_exponential) {
  HeadGroupSums(row.lanes, row.largest).finish(sum, max_exponential);
}

/// The shift that the logits of `old` need may exceed the shift of the shared row by at most this
/// number. Otherwise these logits give exponentials above 2^60 on the shared scale, and join() sets
/// the sum to 0.
constexpr std::int32_t kMaxAbove = 60;

void join(const float* const* rows, std::size_t old, float scale, const std::int32_t* shift,
          const float* e, std::size_t shared, float* kept, float* sum, float* max_exponential) {
  bool large[kHeadGroupSize] = {};
  for (int h = 0; h < kHeads; ++h)
    large[h] = rows[h] && old > 0 && shift_of(rows[h], old, scale) > shift[h] + kMaxAbove;
  HeadGroupSums sums;
  const std::size_t whole = old / kBlockTokens * kBlockTokens, mixed = old - whole;
  write_exponentials(rows, whole, scale, shift, kept, sums);
  std::size_t done = 0;  // shared tokens that are already copied
  if (mixed > 0) {
    const float* rest[kHeadGroupSize] = {};
    for (int h = 0; h < kHeads; ++h) rest[h] = rows[h] ? rows[h] + whole : nullptr;
    write_rest(rest, mixed, scale, shift, kept + whole * kHeadGroupSize);
    done = shared < kBlockTokens - mixed ? shared : kBlockTokens - mixed;
    if (done > 0)
      std::memcpy(kept + old * kHeadGroupSize, e, done * kHeadGroupSize * sizeof(float));
    sums.add_block(kept + whole * kHeadGroupSize);
  }
  copy_blocks(e + done * kHeadGroupSize, shared - done, kept + (old + done) * kHeadGroupSize, sums);
  sums.finish(sum, max_exponential);
  for (int h = 0; h < kHeads; ++h)
    if (large[h]) sum[h] = 0;
}

}  // namespace
}  // namespace kvlab
