// `kvlab bench attention`: decode attention with and without observation and eviction.
#pragma once

#include "tools/command.hpp"

namespace kvlab {

/// `--head-size`, `--group`, `--sequences`, `--slots`; `--policy` (default: all that evict) is one
/// of add_policy_options().
void add_attention_options(po::options_description& options);
/// Prints the table, or one JSON object. Throws std::invalid_argument for bad options and
/// std::runtime_error without a device.
void run_attention_bench(const po::variables_map& options);

}  // namespace kvlab
