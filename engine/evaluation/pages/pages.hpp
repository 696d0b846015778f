// HTML pages of the results of `kvlab eval`, `fidelity`, `task` and `tune`, for `kvlab report`.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "sim/report/figure.hpp"

namespace kvlab {

/// The page of a folder that `kvlab eval --out` wrote. Throws std::runtime_error that names the
/// file if the folder is not one.
std::string eval_page(const std::filesystem::path& folder);

/// The page of a folder that `kvlab fidelity` wrote. Throws as eval_page() does.
std::string fidelity_page(const std::filesystem::path& folder);
/// The figures of that page: KL against bytes, then KL against the deciding metric at each budget.
/// Throws as eval_page() does.
std::vector<Figure> fidelity_figures(const std::filesystem::path& folder);

/// The page of a folder that `kvlab task --out` wrote. Throws std::runtime_error if it is not one.
std::string task_page(const std::filesystem::path& folder);

/// The page of a policy file that `kvlab tune` wrote: the choice with its evidence, then successive
/// halving round by round. Throws std::runtime_error that names the file if it is damaged or has no
/// successive halving.
std::string halving_page(const std::filesystem::path& policy_file);

}  // namespace kvlab
