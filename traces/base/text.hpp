// Text in parts.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace kvlab {

/// The parts between separators; one empty part where `text` is empty.
std::vector<std::string> split_list(std::string_view text, char separator = ',');

}  // namespace kvlab
