// The page of an evaluation: `kvlab eval --out`, read by `kvlab report`.
#pragma once

#include <filesystem>
#include <string>

namespace kvlab {

inline constexpr const char* kEvalCsv = "eval.csv";
inline constexpr const char* kEvalJson = "eval.json";

/// Of a folder with the two files. Throws std::runtime_error that names the file: not what
/// `kvlab eval --out` wrote.
/// `fixed`: pictures and no script, even where there is Vega.
std::string eval_page(const std::filesystem::path& folder, bool fixed = false);

}  // namespace kvlab
