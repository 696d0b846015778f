// Sums of values, weighted by exponentials: attention's outputs at sampled queries. Some queries
// are taken together, so that a value is read for all of them while it is in cache.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sim/lanes/group_rows.hpp"

namespace kvlab {

/// y[h][d] += weights[i][h] * value d of tokens[i], i < count, for the four heads of a quad.
struct ValueJob {
  const float* weights;         ///< [count][4]
  const std::uint32_t* tokens;  ///< ascending; null: token first + i
  std::size_t count;
  float* y;  ///< [4][dim]
  std::uint32_t first = 0;
  std::uint32_t heads = kQuad;  ///< of the four; the others stay as they are
};

/// Does all of them: those of many tokens by ranges of tokens, the others one after another.
void add_values(const HeadView& view, std::span<const ValueJob> jobs);

/// The full cache's rows of some sampled queries, kept until their outputs are taken.
class SampledRows {
 public:
  explicit SampledRows(const HeadView& view) : view_(view) {}

  std::size_t size() const { return used_; }
  void clear() { used_ = 0; }
  /// Copies the row of `query` out of `rows`.
  void add(std::uint32_t query, const GroupRows& rows);
  /// The jobs that fill outputs().
  void list_jobs(std::vector<ValueJob>& jobs);
  /// After the jobs.
  void finish();

  const HeadView& view() const { return view_; }
  std::uint32_t quads() const { return quads_; }
  std::uint32_t heads() const { return quads_ * static_cast<std::uint32_t>(kQuad); }  ///< padded
  std::uint32_t query(std::size_t i) const { return rows_[i].query; }
  /// [query + 1][4].
  const float* e(std::size_t i, std::uint32_t quad) const {
    return rows_[i].e.data() + quad * (rows_[i].query + std::size_t{1}) * kQuad;
  }
  const float* sums(std::size_t i) const { return rows_[i].sums.data(); }
  /// The full cache's output of a head, [dim], and its squared norm.
  const float* output(std::size_t i, std::uint32_t head) const {
    return rows_[i].outputs.data() + head * view_.head_size;
  }
  double norm2(std::size_t i, std::uint32_t head) const { return rows_[i].norms2[head]; }

 private:
  struct Row {
    std::uint32_t query = 0;
    AlignedVector<float> e, outputs;  // [quad][query + 1][4], [heads()][dim]
    std::vector<float> sums;          // [heads()]
    std::vector<double> norms2;       // [heads()]
  };
  HeadView view_;
  std::uint32_t quads_ = 0;
  std::vector<Row> rows_;
  std::size_t used_ = 0;
};

}  // namespace kvlab
