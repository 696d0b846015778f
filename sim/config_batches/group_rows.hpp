// The full cache's rows of one KV head for all query heads of its group, a block of queries at a
// time, as the configuration batches read them: exponentials [query][head group][token][4].
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "sim/config_batches/loops/row_loops.hpp"
#include "sim/head_view.hpp"
#include "traces/base/numeric/aligned.hpp"
#include "traces/base/numeric/panels.hpp"
#include "traces/base/numeric/rope.hpp"

namespace kvlab {

/// The smallest exponential of a row whose token is requested; 0: all tokens are. Whether a token
/// is requested is monotone in its exponential, so no probability has to be computed.
float min_requested(float sum, float most, std::uint32_t threshold16);

class GroupRows {
 public:
  /// `quantized` [token, dim]: the keys after RoPE and the Hadamard rotation, with the values that
  /// their quantized form gives; empty: the view's keys.
  GroupRows(const HeadView& view, const RopeTable& rope, const HeadArithmetic& arithmetic,
            std::span<const float> quantized = {});

  /// Queries a block holds: enough to reuse keys, few enough that rows stay in cache.
  std::uint32_t block_queries() const { return block_; }
  /// Computes the rows of queries [first, first + count), count <= block_queries(). `from`: the
  /// first token that will be read; earlier ones may be left out.
  void compute(std::uint32_t first, std::uint32_t count, std::uint32_t from = 0);

  const HeadView& view() const { return view_; }
  std::uint32_t group() const { return view_.group; }
  std::uint32_t head_groups() const { return head_groups_; }
  std::uint32_t heads() const {
    return head_groups_ * static_cast<std::uint32_t>(kHeadGroupSize);
  }  ///< padded
  std::uint32_t threshold16() const { return arithmetic_.threshold16; }

  /// [query + 1][4], and zeros up to a whole block.
  const float* e(std::uint32_t query, std::uint32_t head_group) const {
    return e_.data() +
           (std::size_t{query - first_} * head_groups_ + head_group) * stride_ * kHeadGroupSize;
  }
  float softmax_scale() const { return arithmetic_.softmax_scale; }
  /// Lane sums of the rows, [heads()]; 0 for padding.
  const float* sums(std::uint32_t query) const { return sums_.data() + row(query); }

  /// Their largest exponentials, [heads()].
  const float* most(std::uint32_t query) const { return most_.data() + row(query); }
  /// The shifts that the exponentials were taken with (traces/base/numeric/softmax.hpp), [heads()].
  const std::int32_t* shifts(std::uint32_t query) const { return shifts_.data() + row(query); }

  /// Which earlier tokens the rows request (N_t; the query's own token is not in it).
  struct Requests {
    const float* least;          ///< [heads()]: e from which on a token is requested
    const std::uint32_t* count;  ///< [heads()]
  };
  Requests requests(std::uint32_t query);
  /// The requested tokens as bits, [heads()][words()].
  const std::uint64_t* request_bits(std::uint32_t query);
  std::size_t words() const { return words_; }
  /// The mass that every token receives from the query: [query + 1], summed over the group,
  /// unweighted; Q32.32.
  const std::uint64_t* masses(std::uint32_t query);
  /// Adds masses() to mass [query + 1, and up to a whole block].
  void add_masses(std::uint32_t query, std::uint64_t* mass) const;
  /// 1 where some head of the group requests the token, the query's own included: [query + 1].
  const std::uint32_t* request_flags(std::uint32_t query);

  /// Sums of a head group's exponentials from token `first` on.
  std::array<double, kHeadGroupSize> sums_from(std::uint32_t query, std::uint32_t head_group,
                                               std::uint32_t first);
  /// Sums of the values of these tokens, weighted by their exponentials: [heads()][dim], valid
  /// until the next call.
  const float* values_from(std::uint32_t query, std::uint32_t first);
  /// The full cache's outputs, [heads()][dim], and their squared norms, [heads()].
  const float* outputs(std::uint32_t query);
  const double* norms2(std::uint32_t query);

  /// Number of gradient samples of every measured query.
  std::uint32_t gradient_samples() const { return gradients_.gradient_samples(); }
  /// Adds to changes [gradient sample] how much the log-likelihood changes with the outputs
  /// factors[h] * kept [group][dim] instead of the full cache's.
  void add_changes(std::uint32_t query, const float* kept, const float* factors, float* changes);

  /// Recomputes the logits of some tokens, for a live set whose exponentials have lost bits.
  void logits(std::uint32_t query, std::uint32_t head, std::span<const std::uint32_t> tokens,
              float* out) const;

 private:
  /// Results that are computed on first use, for each query of the block.
  struct Lazy {
    bool requests = false, flags = false, masses = false, requested = false, tails = false,
         values = false, outputs = false, divided = false;
    std::vector<float> least;
    std::vector<std::uint64_t> bits;
    AlignedVector<std::uint64_t> mass;
    std::vector<std::uint32_t> count, any;
    std::vector<std::array<double, kHeadGroupSize>>
        tail;                       // [head group][token / 64]: sums from there on
    std::vector<float> value_tail;  // [token / 64][heads()][dim]: sums from there on
    std::size_t first_tail;         // the first tail that is computed
    std::vector<float> output;      // [heads()][dim]
    std::vector<double> norm2;      // [heads()]
  };
  std::size_t row(std::uint32_t query) const { return std::size_t{query - first_} * heads(); }
  void extend(std::uint32_t count, std::uint32_t begin, std::uint32_t end);
  void sum_tails(std::uint32_t query, Lazy& parts);
  void sum_outputs(std::uint32_t query);
  void add_values(std::uint32_t query, std::size_t begin, std::size_t end, float* sums) const;
  Lazy& lazy(std::uint32_t query) { return lazy_[query - first_]; }
  void rotate_query(const float* x, std::uint32_t position, float* y) const;

  HeadView view_;
  const RopeTable& rope_;
  HeadArithmetic arithmetic_;
  bool quantized_;  // keys are after the Hadamard rotation
  Panels keys_;     // [token, dim], rotated
  std::uint32_t block_, head_groups_, first_ = 0, count_ = 0;
  std::size_t stride_, words_;    // tokens of a row, padded; 64-bit words of a row's bits
  AlignedVector<float> queries_;  // [block, group, dim], rotated
  AlignedVector<float> tile_;     // [block, group, some tokens]: their logits
  std::vector<HeadGroupRow> head_group_rows_;  // [block, head group]
  AlignedVector<float> e_;                     // [block, head group, token, 4]
  std::vector<float> sums_, most_;             // [block, heads()]
  std::vector<std::int32_t> shifts_;           // [block, heads()]
  std::vector<Lazy> lazy_;                     // [block]
  std::vector<float> values_;                  // [heads()][dim]: what values_from() returns
  GradientBlock gradients_;
};

}  // namespace kvlab
