// Choosing what to show of a run: one head at one budget, and what each policy kept of it over
// time.
#pragma once

#include "sim/run/run.hpp"

namespace kvlab {

/// What the policies of `grid` kept of one head of `trace` over the queries of the span: at the
/// run's middle budget, on the head whose recall differs most between policies (from `rows`, the
/// trace's own). Nothing where there is no budget or no policy.
std::optional<Kept> kept_over_time(const TraceReader& trace, std::uint32_t sequence,
                                   std::string_view trace_name, std::span<const CacheConfig> grid,
                                   const ReplayOptions& options, std::span<const ResultRow> rows);

}  // namespace kvlab
