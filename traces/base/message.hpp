// Error messages in a form that a terminal or Python can show.
#pragma once

#include <string>
#include <string_view>

namespace kvlab {

/// printable() of a message. If it is longer than 1,000 bytes, " ... " replaces the middle, because
/// the end states the reason, for example after a long path.
std::string brief_line(std::string_view text);

}  // namespace kvlab
