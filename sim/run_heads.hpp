// One KV head, or all of a layer, through several runs, block of queries by block of queries.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "sim/head_run.hpp"

namespace kvlab {

/// Queries begin … end - 1.
struct QueryRange {
  std::uint32_t begin, end;
};

/// Takes queries, in order, through every run. Shared rows are computed only where somebody wants
/// them.
void run_head(QueryRange queries, SharedRows& rows, std::span<const std::unique_ptr<HeadRun>> runs);

/// One run of each KV head of a layer.
using LayerRun = std::vector<std::unique_ptr<HeadRun>>;

/// Takes the KV heads of a layer through every run query by query, so that caches may evict
/// together: for scope=layer. `rows`: by KV head.
void run_layer(QueryRange queries, std::span<SharedRows> rows, std::span<const LayerRun> runs);

}  // namespace kvlab
