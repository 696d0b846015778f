// The loops over rows of exponentials, compiled once for each instruction set and chosen at run
// time. All sets give the same bits.
//
// Four query heads of a group are a head group, padded with zeros; a row's exponentials lie as
// [token][4], so that a scattered read brings a token's four in one 16-byte load. Every row has
// room for whole blocks of sixteen tokens, and zeros there behind its last one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvlab {

inline constexpr std::size_t kHeadGroupSize = 4;  ///< query heads that are taken together
inline constexpr std::size_t kBlockTokens = 16;   ///< rows are padded to whole blocks of tokens

/// `tokens`, and as many more as fill their last block.
constexpr std::size_t whole_blocks(std::size_t tokens) {
  return (tokens + kBlockTokens - 1) / kBlockTokens * kBlockTokens;
}

inline constexpr std::size_t kPanelTokens = 32;  ///< keys of a panel: [dim][32]
/// Bins for what is too small for the others, in turns: one alone would wait for itself.
inline constexpr std::size_t kRestBins = 8;

/// A head group's row while its logits come, some tokens after others.
struct HeadGroupRow {
  float* e;                                           ///< [token][4]
  std::size_t tokens = 0;                             ///< so far
  float lanes[kBlockTokens * kHeadGroupSize] = {};    ///< [token % 16][4]: running sums
  float largest[kBlockTokens * kHeadGroupSize] = {};  ///< the largest of some tokens each
  std::int32_t shift[kHeadGroupSize] = {};
};

struct RowLoops {
  const char* name;  ///< of the instruction set

  /// From logits to shared exponentials (traces/base/numeric/softmax.hpp): logits[h] holds the next
  /// `count` tokens', to be scaled; null: padding, zeros. All calls for a row but the last bring
  /// whole blocks; zeros follow up to one. The shift is that of the first call as long as no logit
  /// is more than 2^30 times as probable as the largest of that; else what there is is taken down.
  void (*extend)(HeadGroupRow& row, const float* const* logits, std::size_t count, float scale);
  /// A row's sum[4] (lane sums) and most[4].
  void (*finish)(const HeadGroupRow& row, float* sum, float* most);
  /// Gathers the exponentials of tokens[i], i < count, into kept [count][4] and zeros up to a whole
  /// block. sum[4]: lane sums in the order of i; most[4]: the largest, 0 at least.
  void (*gather)(const float* e, const std::uint32_t* tokens, std::size_t count, float* kept,
                 float* sum, float* most);
  /// The sums, in no order that a decoder knows; hits[h] += tokens with e >= least[h]. Tokens
  /// null: 0, 1, 2, ...
  void (*total)(const float* e, const std::uint32_t* tokens, std::size_t count, const float* least,
                float* sum, std::uint32_t* hits);
  /// total() of lists that follow one another, the l-th of tokens[begins[l]] to
  /// tokens[begins[l + 1] - 1] but for the last `unseen` of the first list, and running over the
  /// lists: sums[l * stride + h], hits[l * stride + h].
  void (*run_totals)(const float* e, const std::uint32_t* tokens, const std::size_t* begins,
                     std::size_t lists, std::size_t unseen, const float* least, std::size_t stride,
                     double* sums, std::uint32_t* hits);
  /// mass[i] += sum over the head group of fixed_mass(1, kept / sum[h]), i < count; `first`: =
  /// instead. A head with sum 0 is padding. Works on whole blocks.
  void (*masses)(const float* kept, std::size_t count, const float* sum, bool first,
                 std::uint64_t* mass);
  /// asked[i] |= whether some head h of the head group has kept >= least[h]; `first`: = instead.
  void (*mark)(const float* kept, std::size_t count, const float* least, bool first,
               std::uint32_t* requested);
  /// Bit i of bits[h] (64-bit words, `words` apart): whether e[i][h] >= least[h], i < count;
  /// the bits behind are 0.
  void (*flag)(const float* e, std::size_t count, const float* least, std::uint64_t* bits,
               std::size_t words);
  /// A head group's exponentials by head, bits[h][i] (`stride` apart), and in bins by size: the
  /// difference of their bits from most[h], shifted right by shift[h], or, where that is not below
  /// last_bin, one of kRestBins bins from there on. Whole blocks.
  void (*bin)(const float* e, std::size_t count, const std::uint32_t* most,
              const std::uint32_t* shift, std::uint32_t last_bin, std::uint32_t* bits,
              std::uint16_t* bins, std::size_t stride);
  /// The first index of the smallest rank in [begin, end), begin < end.
  std::size_t (*first_least)(const std::uint64_t* ranks, std::size_t begin, std::size_t end);
  /// Bits set in both.
  std::uint64_t (*common)(const std::uint64_t* a, const std::uint64_t* b, std::size_t words);
  /// to[i] [4] = e of tokens[i], negative where bit tokens[i] of `bits` is not set; size[h] +=
  /// their magnitudes.
  void (*list_weights)(const float* e, const std::uint32_t* tokens, std::size_t count,
                       const std::uint64_t* bits, float* to, float* size);
  /// y[h][d] += weights[i][h] * v[tokens[i] * stride + d], i < count in order (null: token i),
  /// fused, for the first `heads` of four.
  void (*accumulate)(const float* weights, const std::uint32_t* tokens, std::size_t count,
                     std::size_t heads, const float* v, std::size_t stride, std::size_t depth,
                     float* y);
  /// The sum of (a[i] - factor * b[i])^2, in double.
  double (*distance2)(const float* a, const float* b, float factor, std::size_t count);
  /// distance2() in float for some heads: a, b [heads][count].
  void (*quick_distances)(const float* a, const float* b, std::size_t heads, const float* factors,
                          std::size_t count, double* distances);
  /// changes[d] += sum over heads and i of gradients[d][h][i] * (factors[h] * b[h][i] - a[h][i]),
  /// d < gradient samples; a, b [heads][count].
  void (*add_changes)(const float* a, const float* b, std::size_t heads, const float* factors,
                      std::size_t count, const float* gradients, std::size_t gradient_samples,
                      float* changes);
  /// Takes key `gap` out of a panel [dim][32]: those behind it move up, and the first of the `next`
  /// panel (null: zeros) comes in. Reads one float behind the panel.
  void (*close_gap)(float* panel, const float* next, std::size_t gap, std::size_t dim);
  /// Rotates 32 keys, panel [dim][32]: dimensions d and d + half by cos[d][i], sin[d][i]
  /// ([half][32]), those from 2 half on stay.
  void (*rotate_panel)(const float* panel, const float* cos, const float* sin, std::size_t half,
                       std::size_t dim, float* rotated);
  /// out[h][i] = queries[h] [dim] times key i, one chain of fused multiply-adds, i < 32 * panels;
  /// keys [panels][dim][32]. Up to four queries, the others null: not written.
  void (*panel_products)(const float* keys, std::size_t panels, std::size_t dim,
                         const float* const* queries, float* out, std::size_t out_stride);
  /// A row whose `old` first logits (rows[h], to be scaled; null: padding) are its own and whose
  /// `shared` others have the exponentials e [shared][4], taken with shift[h]: gathers all into
  /// kept [old + shared][4], as gather() does. sum[h] = 0 where the own ones are too large for that
  /// shift.
  void (*join)(const float* const* rows, std::size_t old, float scale, const std::int32_t* shift,
               const float* e, std::size_t shared, float* kept, float* sum, float* most);
};

/// The loops of the best instruction set that this machine has.
const RowLoops& row_loops();
const RowLoops& row_loops_base();
/// Null where the machine (or the build) has no such instructions.
const RowLoops* row_loops_avx2();
const RowLoops* row_loops_avx512();

}  // namespace kvlab
