// The larger two of what `kvlab bench` measures: their options, measuring and printing. Both throw
// as commands do.
#pragma once

#include "tools/command.hpp"

namespace kvlab {

/// A replay beside an exact pass: `--grid`, `--repeats`, `--synthetic-…`.
void add_bench_replay_options(po::options_description& options);
void run_bench_replay(const po::variables_map& options);

/// Decode attention with and without observation and eviction: `--head-size`, `--group`,
/// `--sequences`, `--slots`; `--policy` (default: all that evict) is one of add_policy_options().
void add_attention_options(po::options_description& options);
void run_attention_bench(const po::variables_map& options);

}  // namespace kvlab
