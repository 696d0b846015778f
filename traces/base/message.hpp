// Error messages in a form that a terminal or Python can show.
#pragma once

#include <string>
#include <string_view>

namespace kvlab {

/// Applies printable() to a message. If the message is longer than 1,000 bytes, " ... " replaces
/// its middle, so that a long path does not hide the reason at the end.
std::string brief_line(std::string_view text);

}  // namespace kvlab
