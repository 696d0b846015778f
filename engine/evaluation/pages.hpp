// The data of the pages that `kvlab report` makes of results of `kvlab eval`, `fidelity`, `task`
// and `tune`. Each function throws std::runtime_error that names the file if the file is not a
// result of the expected command.
#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "engine/evaluation/scores.hpp"
#include "sim/report/figure.hpp"
#include "sim/report/page.hpp"

namespace kvlab {

/// The page of what load_scores() read from a folder of `kvlab eval`, or of `kvlab task`.
PageDocument eval_page(const ScoreSet& scores);
PageDocument task_page(const ScoreSet& scores);

struct FidelityPage {
  PageDocument page;
  /// KL against bytes, then KL against the deciding metric at each budget.
  std::vector<Figure> figures;
};
FidelityPage fidelity_page(const std::filesystem::path& folder);

/// The page of a policy file, which was parsed from `path`: the choice with its evidence, then
/// successive halving round by round.
PageDocument tune_page(nlohmann::json top, const std::string& path);

}  // namespace kvlab
