// The data of the pages about results of `kvlab eval`, `fidelity`, `task` and `tune`, for `kvlab
// report`. Each function reads what the command wrote. If it is not a result of that command, the
// function throws std::runtime_error that names the file.
#pragma once

#include <filesystem>
#include <vector>

#include "sim/report/figure.hpp"
#include "sim/report/page.hpp"

namespace kvlab {

PageDocument eval_page(const std::filesystem::path& folder);
PageDocument task_page(const std::filesystem::path& folder);
PageDocument fidelity_page(const std::filesystem::path& folder);
/// The figures of the fidelity page: KL against bytes, then KL against the deciding metric at each
/// budget.
std::vector<Figure> fidelity_figures(const std::filesystem::path& folder);
/// The page of a policy file: the choice with its evidence, then successive halving round by round.
PageDocument tune_page(const std::filesystem::path& policy_file);

}  // namespace kvlab
