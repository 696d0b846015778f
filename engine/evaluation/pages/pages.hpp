// Pages of what `kvlab eval`, `fidelity`, `task` and `tune` leave behind, for `kvlab report`.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "sim/report/figure.hpp"

namespace kvlab {

/// Of a folder of `kvlab eval --out`. Throws std::runtime_error that names the file: not what that
/// wrote.
std::string eval_page(const std::filesystem::path& folder);

/// Of a folder of `kvlab fidelity`. Throws likewise.
std::string fidelity_page(const std::filesystem::path& folder);
/// Its figures: KL against bytes, then the one that decides against KL, at each budget. Throws
/// likewise.
std::vector<Figure> fidelity_figures(const std::filesystem::path& folder);

/// Of a folder of `kvlab task --out`. Throws std::runtime_error: not one.
std::string task_page(const std::filesystem::path& folder);

/// Of a policy file of `kvlab tune`: who won, by how much, on what; then successive halving, round
/// by round. Throws std::runtime_error that names the file: damaged, or without successive halving.
std::string halving_page(const std::filesystem::path& policy_file);

}  // namespace kvlab
