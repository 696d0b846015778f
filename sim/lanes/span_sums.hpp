// What live sets keep of the trace's named spans: see `span_recall` in docs/metrics.md.
#pragma once

#include <span>

#include "sim/lanes/group_rows.hpp"
#include "sim/metrics.hpp"

namespace kvlab {

/// Adds a measured query's figures: set l keeps tokens[0] to tokens[begins[l + 1] - 1], of which
/// those from begins[l] on ascend. `stats`: of every set.
void add_span_sums(const QuerySpan& span, std::uint32_t query, const GroupRows& rows,
                   const std::uint32_t* tokens, std::span<const std::size_t> begins,
                   std::span<HeadStats> stats);

}  // namespace kvlab
