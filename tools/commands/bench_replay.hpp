// `kvlab bench replay`: a replay beside an exact pass of attention.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "tools/command.hpp"

namespace kvlab {

/// `--trace`, `--grid`, `--repeats`, `--synthetic-…`.
void add_bench_replay_options(po::options_description& options);
/// What was measured. Throws as commands do.
nlohmann::ordered_json bench_replay(const po::variables_map& options);

}  // namespace kvlab
