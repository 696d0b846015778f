// Choosing what to show of a run: two heads at one budget, and what each policy kept of them over
// time.
#pragma once

#include "sim/run/run.hpp"

namespace kvlab {

/// What the policies of `grid` kept of two heads of `trace` over the queries of the span, and what
/// attention the full cache paid there: at the run's middle budget, on the heads whose recall
/// differs most between policies (from `rows`, the trace's own). Nothing where there is no budget
/// or no policy.
std::optional<Kept> kept_over_time(const TraceReader& trace, std::uint32_t sequence,
                                   std::string_view trace_name, std::span<const CacheConfig> grid,
                                   const ReplayOptions& options, std::span<const ResultRow> rows);

}  // namespace kvlab
