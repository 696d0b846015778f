// The page of an evaluation: `kvlab eval --out`, read by `kvlab report`.
#pragma once

#include <filesystem>
#include <string>

namespace kvlab {

inline constexpr const char* kEvalCsv = "eval.csv";
inline constexpr const char* kEvalJson = "eval.json";

/// Of a folder with the two files. Throws std::runtime_error that names the file: not what
/// `kvlab eval --out` wrote.
std::string eval_page(const std::filesystem::path& folder);

}  // namespace kvlab
