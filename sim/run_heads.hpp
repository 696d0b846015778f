// One KV head, or all of a layer, through several runs, block of queries by block of queries.
#pragma once

#include <memory>
#include <vector>

#include "sim/head_run.hpp"

namespace kvlab {

/// Takes queries 0 … tokens-1 through every run. Shared rows are computed only where somebody wants
/// them.
void run_head(std::uint32_t tokens, SharedRows& rows,
              const std::vector<std::unique_ptr<HeadRun>>& runs);

/// One run of each KV head of a layer.
using LayerRun = std::vector<std::unique_ptr<HeadRun>>;

/// Takes the KV heads of a layer through every run query by query, so that caches may evict
/// together: for scope=layer. `rows`: by KV head.
void run_layer(std::uint32_t tokens, std::span<SharedRows> rows, std::span<const LayerRun> runs);

}  // namespace kvlab
