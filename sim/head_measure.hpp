// Computes the metrics of one KV head from the sets of tokens to which its queries attend. Takes
// one query head of one query at a time. The plain replay and the replay with refetch use it.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "sim/row_measure.hpp"
#include "sim/shared_rows.hpp"

namespace kvlab {

class HeadMeasure : public RowMeasure {
 public:
  /// If `measured` is null, nothing is measured. `measured` and the data of `view` must outlive
  /// this object.
  HeadMeasure(const MeasuredQueries* measured, const HeadView& view)
      : RowMeasure(measured, 1, view, 1), view_(view) {}

  /// A function that adds the attention output over a set of tokens to `out` [dim].
  using Accumulate = std::function<void(float* out)>;
  /// Measures one query head of a measured query. The query attends to `tokens` (ascending
  /// positions). The query heads must be given in order. Returns the attention output over
  /// `tokens`, or an empty span if outputs are not measured at this query. The span is valid until
  /// the next call.
  std::span<const float> add_row(std::uint32_t query, std::uint32_t head,
                                 std::span<const std::uint32_t> tokens, SharedRows& rows,
                                 const Accumulate& accumulate);

 private:
  void add_changes(std::uint32_t query, std::uint32_t head, std::span<const float> full,
                   SharedRows& rows);

  HeadView view_;
  std::vector<float> kept_, out_;  // kept_: exponentials by age; out_: [dim]
};

}  // namespace kvlab
