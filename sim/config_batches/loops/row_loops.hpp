// The loops over rows of exponentials, compiled once for each instruction set and chosen at run
// time. All instruction sets give bit-identical results.
//
// Four query heads of a group form a head group, padded with zeros. A row's exponentials are stored
// as [token][4], so that the four values of a token, wherever it is in the row, are read with one
// load of 16 bytes. Every row is padded with zeros to whole blocks of sixteen tokens.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvlab {

inline constexpr std::size_t kHeadGroupSize = 4;  ///< query heads that are processed together
inline constexpr std::size_t kBlockTokens = 16;   ///< rows are padded to whole blocks of tokens

/// `tokens` rounded up to whole blocks.
constexpr std::size_t whole_blocks(std::size_t tokens) {
  return (tokens + kBlockTokens - 1) / kBlockTokens * kBlockTokens;
}

inline constexpr std::size_t kPanelTokens = 32;  ///< keys of a panel: [dim][32]
/// Number of bins for values that are too small for the other bins. These values are distributed
/// over the kRestBins bins in turn, because consecutive updates of one bin would wait for each
/// other.
inline constexpr std::size_t kRestBins = 8;

/// The row of a head group while it is being computed. extend() adds the logits of some tokens at a
/// time.
struct HeadGroupRow {
  float* e;                                         ///< [token][4]
  std::size_t tokens = 0;                           ///< tokens so far
  float lanes[kBlockTokens * kHeadGroupSize] = {};  ///< [token % 16][4]: running sums
  /// Running maxima; each covers some of the tokens.
  float largest[kBlockTokens * kHeadGroupSize] = {};
  std::int32_t shift[kHeadGroupSize] = {};
};

struct RowLoops {
  const char* name;  ///< name of the instruction set

  /// Converts logits to shared exponentials (traces/base/numeric/softmax.hpp) and appends them to
  /// the row. logits[h] holds the logits of the next `count` tokens, to be multiplied by `scale`;
  /// null: padding, which becomes zeros. All calls for a row except the last append whole blocks;
  /// the last block is padded with zeros. The shift of the first call is kept as long as no token
  /// is more than 2^30 times as probable as the most probable token of that call. Otherwise the
  /// shift is raised, and the row's exponentials are scaled down.
  void (*extend)(HeadGroupRow& row, const float* const* logits, std::size_t count, float scale);
  /// Computes, for each head, the sum of a row (sum[4], as by lane_sum()) and its maximum
  /// (most[4]).
  void (*finish)(const HeadGroupRow& row, float* sum, float* max_exponential);
  /// Gathers the exponentials of tokens[i], i < count, into kept [count][4], padded with zeros to a
  /// whole block. sum[4]: the sum for each head (as by lane_sum(), in the order of i). most[4]: the
  /// largest for each head, at least 0.
  void (*gather)(const float* e, const std::uint32_t* tokens, std::size_t count, float* kept,
                 float* sum, float* max_exponential);
  /// Sums the exponentials of tokens[i], i < count (`tokens` null: tokens 0, 1, 2, ...), in an
  /// order that differs from that of a decoder. hits[h] += the number of these tokens with e >=
  /// least[h].
  void (*total)(const float* e, const std::uint32_t* tokens, std::size_t count,
                const float* request_threshold, float* sum, std::uint32_t* hits);
  /// mass[i] += the sum over the head group of fixed_mass(1, kept / sum[h]), i < count. If `first`
  /// is true, assigns instead of adding. A head with sum 0 is padding. Works on whole blocks.
  void (*masses)(const float* kept, std::size_t count, const float* sum, bool first,
                 std::uint64_t* mass);
  /// requested[i] |= whether some head h of the head group has kept >= least[h]. If `first` is
  /// true, assigns instead.
  void (*mark)(const float* kept, std::size_t count, const float* request_threshold, bool first,
               std::uint32_t* requested);
  /// Sets bit i of bits[h] (64-bit words, `words` apart) to whether e[i][h] >= least[h], i < count;
  /// later bits are 0.
  void (*flag)(const float* e, std::size_t count, const float* request_threshold,
               std::uint64_t* bits, std::size_t words);
  /// Writes the exponentials of a head group by head, as bit patterns bits[h][i] and as bins
  /// bins[h][i] (heads are `stride` apart). The bin of an exponential is (most[h] - its bits) >>
  /// shift[h] or, if that is not below last_bin, one of the kRestBins bins from last_bin on. Works
  /// on whole blocks.
  void (*bin)(const float* e, std::size_t count, const std::uint32_t* max_words,
              const std::uint32_t* shift, std::uint32_t last_bin, std::uint32_t* bits,
              std::uint16_t* bins, std::size_t stride);
  /// The number of bits that are set in both a and b.
  std::uint64_t (*common)(const std::uint64_t* a, const std::uint64_t* b, std::size_t words);
  /// Copies the exponentials [4] of tokens[i] to to[i], negated if bit tokens[i] of `bits` is not
  /// set, and adds their magnitudes to size[head].
  void (*list_weights)(const float* e, const std::uint32_t* tokens, std::size_t count,
                       const std::uint64_t* bits, float* to, float* size);
  /// y[h][d] += weights[i][h] * v[tokens[i] * stride + d], i < count in order (`tokens` null: token
  /// i), with fused multiply-adds, for the first `heads` of four.
  void (*accumulate)(const float* weights, const std::uint32_t* tokens, std::size_t count,
                     std::size_t heads, const float* v, std::size_t stride, std::size_t depth,
                     float* y);
  /// The sum of (a[i] - factor * b[i])^2, in double.
  double (*distance2)(const float* a, const float* b, float factor, std::size_t count);
  /// changes[d] += sum over heads and i of gradients[d][h][i] * (factors[h] * b[h][i] - a[h][i]),
  /// d < gradient samples; a, b [heads][count].
  void (*add_changes)(const float* a, const float* b, std::size_t heads, const float* factors,
                      std::size_t count, const float* gradients, std::size_t gradient_samples,
                      float* changes);
  /// Removes key `gap` from a panel [dim][32]: later keys move to the index before, and the first
  /// key of panel `next` (null: zeros) becomes the last. Reads one float beyond the panel.
  void (*close_gap)(float* panel, const float* next, std::size_t gap, std::size_t dim);
  /// Rotates the 32 keys of a panel [dim][32]. For key i, dimensions d and d + half are rotated by
  /// the angle with cosine cos[d][i] and sine sin[d][i]; both are [half][32]. Dimensions from 2
  /// half on are copied unchanged.
  void (*rotate_panel)(const float* panel, const float* cos, const float* sin, std::size_t half,
                       std::size_t dim, float* rotated);
  /// out[h][i] = queries[h] [dim] times key i, computed as one chain of fused multiply-adds, i < 32
  /// * panels; keys [panels][dim][32]. There are up to four queries; for a null query nothing is
  /// written.
  void (*panel_products)(const float* keys, std::size_t panels, std::size_t dim,
                         const float* const* queries, float* out, std::size_t out_stride);
  /// Converts the logits of `old` tokens (rows[h], to be multiplied by `scale`; null: padding) to
  /// exponentials with shift[h]. Appends e [shared][4], the exponentials of `shared` later tokens
  /// with the same shifts. Writes all to kept [old + shared][4], with sums and maxima as in
  /// gather(). sum[h] = 0 if the logits are too large for that shift.
  void (*join)(const float* const* rows, std::size_t old, float scale, const std::int32_t* shift,
               const float* e, std::size_t shared, float* kept, float* sum, float* max_exponential);
};

/// The loops for the best instruction set of this machine.
const RowLoops& row_loops();
const RowLoops& row_loops_base();
/// Null if the machine (or the build) has no such instructions.
const RowLoops* row_loops_avx2();
const RowLoops* row_loops_avx512();

}  // namespace kvlab
