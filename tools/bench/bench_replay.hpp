// `kvlab bench replay`.
#pragma once

#include "tools/command.hpp"

namespace kvlab {

void add_bench_replay_options(po::options_description& options);
/// Measures and prints. Throws as commands do.
void run_bench_replay(const po::variables_map& options);

}  // namespace kvlab
