// The loops over rows of exponentials, compiled once for each instruction set and chosen at run
// time. All instruction sets give bit-identical results.
//
// Four query heads of a group form a head group. If the group has too few heads, zeros fill the
// head group. A row's exponentials are stored as [token][4], so that the four values of any token
// are read with one load of 16 bytes. Every row is padded with zeros to whole blocks of sixteen
// tokens.
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
  /// Running maxima. Each element covers some of the tokens.
  float largest[kBlockTokens * kHeadGroupSize] = {};
  std::int32_t shift[kHeadGroupSize] = {};
};

struct RowLoops {
  const char* name;  ///< name of the instruction set

  /// Converts logits to shared exponentials (traces/base/numeric/softmax.hpp) and appends them to
  /// the row. logits[h] holds the logits of the next `count` tokens, before multiplication by
  /// `scale`. If logits[h] is null, head h is padding and gets zeros. All calls for a row except
  /// the last append whole blocks; the last block is padded with zeros. The first call sets the
  /// shift. If a later token is more than 2^30 times as probable as the most probable token of the
  /// first call, the shift is raised, and the row's exponentials are scaled down.
  void (*extend)(HeadGroupRow& row, const float* const* logits, std::size_t count, float scale);
  /// Computes, for each head, the sum of a row (sum[4], in the order of lane_sum()) and its maximum
  /// (max_exponential[4]).
  void (*finish)(const HeadGroupRow& row, float* sum, float* max_exponential);
  /// Gathers the exponentials of tokens[i], i < count, into kept [count][4], padded with zeros to a
  /// whole block. sum[4]: the sum for each head, added in the order of lane_sum() over i.
  /// max_exponential[4]: the largest exponential of each head, at least 0.
  void (*gather)(const float* e, const std::uint32_t* tokens, std::size_t count, float* kept,
                 float* sum, float* max_exponential);
  /// Sums the exponentials of tokens[i], i < count (if `tokens` is null: of tokens 0, 1, 2, ...).
  /// The order of the additions differs from that of a decoder. Adds to hits[h] the number of these
  /// tokens with e >= request_threshold[h].
  void (*total)(const float* e, const std::uint32_t* tokens, std::size_t count,
                const float* request_threshold, float* sum, std::uint32_t* hits);
  /// Adds fixed_mass(1, kept[i][h] / sum[h]), summed over the heads h of the head group, to
  /// mass[i], i < count. If `first` is true, assigns instead of adding. A head with sum 0 is
  /// padding. Works on whole blocks.
  void (*masses)(const float* kept, std::size_t count, const float* sum, bool first,
                 std::uint64_t* mass);
  /// Sets requested[i] to 1 if any head h of the head group has kept[i][h] >= request_threshold[h].
  /// If `first` is true, also sets the other elements to 0.
  void (*mark)(const float* kept, std::size_t count, const float* request_threshold, bool first,
               std::uint32_t* requested);
  /// Sets bit i of bits[h] if e[i][h] >= request_threshold[h], i < count. All other bits are 0. The
  /// 64-bit words of two heads are `words` apart.
  void (*flag)(const float* e, std::size_t count, const float* request_threshold,
               std::uint64_t* bits, std::size_t words);
  /// Writes the exponentials of a head group separately for each head: as bit patterns bits[h][i]
  /// and as bins bins[h][i]. Heads are `stride` apart. The bin of an exponential is (max_words[h] -
  /// bits[h][i]) >> shift[h]. If this number is last_bin or more, the bin is one of the kRestBins
  /// bins from last_bin on. Works on whole blocks.
  void (*bin)(const float* e, std::size_t count, const std::uint32_t* max_words,
              const std::uint32_t* shift, std::uint32_t last_bin, std::uint32_t* bits,
              std::uint16_t* bins, std::size_t stride);
  /// The number of bits that are set in both a and b.
  std::uint64_t (*common)(const std::uint64_t* a, const std::uint64_t* b, std::size_t words);
  /// Copies the exponentials [4] of tokens[i] to to[i], and negates them if bit tokens[i] of `bits`
  /// is not set. Adds their magnitudes to size[head].
  void (*list_weights)(const float* e, const std::uint32_t* tokens, std::size_t count,
                       const std::uint64_t* bits, float* to, float* size);
  /// y[h][d] += weights[i][h] * v[tokens[i] * stride + d], for i < count in order (if `tokens` is
  /// null: v[i * stride + d]) and for the first `heads` of four heads. Uses fused multiply-adds.
  void (*accumulate)(const float* weights, const std::uint32_t* tokens, std::size_t count,
                     std::size_t heads, const float* v, std::size_t stride, std::size_t depth,
                     float* y);
  /// The sum of (a[i] - factor * b[i])^2, in double.
  double (*distance2)(const float* a, const float* b, float factor, std::size_t count);
  /// changes[d] += the sum over h and i of gradients[d][h][i] * (factors[h] * b[h][i] - a[h][i]),
  /// for each gradient sample d; a and b are [heads][count].
  void (*add_changes)(const float* a, const float* b, std::size_t heads, const float* factors,
                      std::size_t count, const float* gradients, std::size_t gradient_samples,
                      float* changes);
  /// Removes key `gap` from a panel [dim][32]. Each later key moves down by one index, and the
  /// first key of the panel `next` (zeros if `next` is null) becomes the last key. Reads one float
  /// beyond the panel.
  void (*close_gap)(float* panel, const float* next, std::size_t gap, std::size_t dim);
  /// Rotates the 32 keys of a panel [dim][32]. For key i, dimensions d and d + half are rotated by
  /// the angle with cosine cos[d][i] and sine sin[d][i]; both arrays are [half][32]. Dimensions 2 *
  /// half and above are copied unchanged.
  void (*rotate_panel)(const float* panel, const float* cos, const float* sin, std::size_t half,
                       std::size_t dim, float* rotated);
  /// out[h][i] = the dot product of queries[h] [dim] and key i, i < 32 * panels, computed as one
  /// chain of fused multiply-adds; keys [panels][dim][32]. There are up to four queries. For a null
  /// query nothing is written.
  void (*panel_products)(const float* keys, std::size_t panels, std::size_t dim,
                         const float* const* queries, float* out, std::size_t out_stride);
  /// Converts the logits of `old` tokens to exponentials with shift[h]. rows[h] holds these logits
  /// before multiplication by `scale`; null: padding. Then appends e [shared][4], the exponentials
  /// of `shared` later tokens with the same shifts. Writes all of them to kept [old + shared][4],
  /// and sums and maxima as in gather(). If the logits of head h are too large for its shift,
  /// sum[h] = 0.
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
