// The page of `kvlab fidelity`.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "sim/report/figure.hpp"

namespace kvlab {

/// Of a folder with fidelity.csv and fidelity.json. Throws std::runtime_error that names the file:
/// not what `kvlab fidelity` wrote.
std::string fidelity_page(const std::filesystem::path& folder);
/// Its figures: KL against bytes, then the one that decides against KL, at each budget. Throws
/// likewise.
std::vector<Figure> fidelity_figures(const std::filesystem::path& folder);

}  // namespace kvlab
