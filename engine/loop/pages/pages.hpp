// Pages of what `kvlab task` and `kvlab tune` leave behind, for `kvlab report`.
#pragma once

#include <filesystem>
#include <string>

namespace kvlab {

/// Of a folder of `kvlab task --out`. Throws std::runtime_error: not one.
std::string task_page(const std::filesystem::path& folder);

/// Of a policy file of `kvlab tune`: who won, by how much, on what; then the race, round by round.
/// Throws std::runtime_error that names the file: damaged, or without a race.
std::string race_page(const std::filesystem::path& policy_file);

}  // namespace kvlab
