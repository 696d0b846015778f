// What an error says, as a terminal or Python may have it.
#pragma once

#include <string>
#include <string_view>

namespace kvlab {

/// printable() of a message. Where that takes more than 1,000 bytes, " ... " stands for its middle,
/// because the reason is at the end, as of a long path.
std::string brief_line(std::string_view text);

}  // namespace kvlab
