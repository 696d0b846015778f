// Options that several commands share: one spelling, one default, one error each.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "sim/replay.hpp"
#include "tools/command.hpp"

namespace kvlab {

/// `--policy`, `--budget`, `--prefill`, `--positions`, `--seed`.
void add_policy_options(po::options_description& options);
/// `--threads`, `--json`, `--device`.
void add_common_options(po::options_description& options);

std::vector<std::string> split_list(std::string_view text, char separator = ',');

/// The grid that `--policy`, `--budget`, … ask for: every policy x budget (x prefill x positions);
/// `full` once. Positions default to each policy's own.
std::vector<ReplayConfig> grid_from(const po::variables_map& options,
                                    std::span<const std::string_view> references = {});

/// `--threads`, at least 1; default: all cores.
unsigned threads_from(const po::variables_map& options);
/// Throws std::invalid_argument for --device cuda in a build without it.
void check_device(const po::variables_map& options);

/// A bar on standard error, on a terminal only; call with the fraction done.
std::function<void(double)> progress_bar(std::string label);

/// Throws std::runtime_error if `path` exists.
void refuse_existing(const std::string& path, std::string_view option);

}  // namespace kvlab
