// Attention rows of the full cache, for one KV head and all query heads of its group. They are
// computed for a block of queries at a time, as exponentials [query][head group][token][4].
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

/// The smallest exponential with which a token counts as requested; 0 if all tokens are requested.
/// A token is requested if its exponential is at least this value, so requests are found without
/// computing probabilities. `sum` and `max_exponential`: the sum and the largest of the row's
/// exponentials.
float min_requested(float sum, float max_exponential, std::uint32_t threshold16);

class GroupRows {
 public:
  /// `quantized` [token, dim]: keys after RoPE, Hadamard rotation, quantization and dequantization.
  /// If it is empty, the keys of `view` are used.
  GroupRows(const HeadView& view, const RopeTable& rope, const HeadArithmetic& arithmetic,
            std::span<const float> quantized = {});

  /// Number of queries in a block. It is large enough to reuse keys, and small enough that the rows
  /// of the block stay in the CPU cache.
  std::uint32_t block_queries() const { return block_; }
  /// Computes the rows of queries [first, first + count), count <= block_queries(). `from`: the
  /// first token whose exponentials will be read. Those of earlier tokens need not be computed.
  void compute(std::uint32_t first, std::uint32_t count, std::uint32_t from = 0);

  const HeadView& view() const { return view_; }
  std::uint32_t group() const { return view_.group; }
  std::uint32_t head_groups() const { return head_groups_; }
  /// Number of query heads, padded to whole head groups.
  std::uint32_t heads() const { return head_groups_ * static_cast<std::uint32_t>(kHeadGroupSize); }
  std::uint32_t threshold16() const { return arithmetic_.threshold16; }

  /// The exponentials of a row: [query + 1][4], padded with zeros to a whole block.
  const float* e(std::uint32_t query, std::uint32_t head_group) const {
    return e_.data() +
           (std::size_t{query - first_} * head_groups_ + head_group) * stride_ * kHeadGroupSize;
  }
  float softmax_scale() const { return arithmetic_.softmax_scale; }
  /// The sum of each row, [heads()], added in the order of lane_sum(); 0 for padding.
  const float* sums(std::uint32_t query) const { return sums_.data() + row(query); }

  /// The largest exponential of each row, [heads()].
  const float* max_exponentials(std::uint32_t query) const { return largest_.data() + row(query); }
  /// The shifts with which the exponentials were computed (traces/base/numeric/softmax.hpp),
  /// [heads()].
  const std::int32_t* shifts(std::uint32_t query) const { return shifts_.data() + row(query); }

  /// The requests of the query heads for earlier tokens. The query's own token is left out (as in
  /// the set N_t of docs/reference/metrics.md).
  struct Requests {
    const float* request_threshold;  ///< [heads()]: smallest exponential that is requested
    const std::uint32_t* count;      ///< [heads()]
  };
  Requests requests(std::uint32_t query);
  /// The requested tokens as bits, [heads()][words()].
  const std::uint64_t* request_bits(std::uint32_t query);
  std::size_t words() const { return words_; }
  /// [query + 1]: the mass that each token receives from the query, summed over the group, before
  /// any weight is applied; Q32.32.
  const std::uint64_t* masses(std::uint32_t query);
  /// Adds masses() to mass [query + 1], which is padded to a whole block.
  void add_masses(std::uint32_t query, std::uint64_t* mass) const;
  /// [query + 1]: 1 for each token that a head of the group requests, including the query's own
  /// token.
  const std::uint32_t* request_flags(std::uint32_t query);

  /// The sums of a head group's exponentials over the tokens from `first` on.
  std::array<double, kHeadGroupSize> sums_from(std::uint32_t query, std::uint32_t head_group,
                                               std::uint32_t first);
  /// Sums of the values of tokens `first` and later, weighted by their exponentials:
  /// [heads()][dim], valid until the next call.
  const float* values_from(std::uint32_t query, std::uint32_t first);
  /// The full cache's outputs, [heads()][dim], and their squared norms, [heads()].
  const float* outputs(std::uint32_t query);
  const double* norms2(std::uint32_t query);

  /// Number of gradient samples of each measured query; 0 if there are no gradients.
  std::uint32_t gradient_samples() const { return gradients_.gradient_samples(); }
  /// Computes, for each gradient sample, the change of log-likelihood if each head h has the output
  /// factors[h] * kept[h] instead of the full cache's output. Adds it to changes [gradient sample].
  /// kept is [group][dim].
  void add_changes(std::uint32_t query, const float* kept, const float* factors, float* changes);

  /// Recomputes the logits of some tokens. It is used when the exponentials of a live set are much
  /// smaller than the largest exponential of the row, so that they have lost precision.
  void logits(std::uint32_t query, std::uint32_t head, std::span<const std::uint32_t> tokens,
              float* out) const;

 private:
  /// Results that are computed on first use, for each query of the block.
  struct Lazy {
    bool requests = false, flags = false, masses = false, requested = false, tails = false,
         values = false, outputs = false, divided = false;
    std::vector<float> request_threshold;
    std::vector<std::uint64_t> bits;
    AlignedVector<std::uint64_t> mass;
    std::vector<std::uint32_t> count, any;
    std::vector<std::array<double, kHeadGroupSize>>
        tail;                       // [head group][token / 64]: sums from that token to the end
    std::vector<float> value_tail;  // [token / 64][heads()][dim]: the same for values
    std::size_t first_tail;         // index of the first tail that has been computed
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
  bool quantized_;  // whether the keys are quantized, and stored after the Hadamard rotation
  Panels keys_;     // [token, dim], rotated
  std::uint32_t block_, head_groups_, first_ = 0, count_ = 0;
  std::size_t stride_, words_;    // tokens of a row, padded; 64-bit words of the bits of a row
  AlignedVector<float> queries_;  // [block, group, dim], rotated
  AlignedVector<float> tile_;     // [block, group, token of a tile]: logits
  std::vector<HeadGroupRow> head_group_rows_;  // [block, head group]
  AlignedVector<float> e_;                     // [block, head group, token, 4]
  std::vector<float> sums_, largest_;          // [block, heads()]
  std::vector<std::int32_t> shifts_;           // [block, heads()]
  std::vector<Lazy> lazy_;                     // [block]
  std::vector<float> values_;                  // [heads()][dim]: what values_from() returns
  GradientBlock gradients_;
};

}  // namespace kvlab
