// Whether an answer is right.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace kvlab {

enum class Judgement { open, right, wrong };

/// Judges by exact match: the first numbers (runs of digits) that `said` holds, as many as are
/// expected, must be those expected, in any order; other words do not count. `open`: more text
/// could decide either way. `ended`: no more comes.
Judgement judge(std::string_view said, std::span<const std::string> expected, bool ended);

}  // namespace kvlab
