// The page of `kvlab fidelity`.
#pragma once

#include <filesystem>
#include <string>

namespace kvlab {

/// Of a folder with fidelity.csv and fidelity.json. Throws std::runtime_error that names the file:
/// not what `kvlab fidelity` wrote.
std::string fidelity_page(const std::filesystem::path& folder);

}  // namespace kvlab
