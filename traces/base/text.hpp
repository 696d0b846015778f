// Text in parts, and text for a terminal.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace kvlab {

/// The parts between separators; one empty part where `text` is empty.
std::vector<std::string> split_list(std::string_view text, char separator = ',');
/// `text` with every `from` replaced, left to right. `from` must not be empty.
std::string replace_all(std::string_view text, std::string_view from, std::string_view to);

/// Whether a terminal would do something with `text` but show it: control characters (C0, DEL, C1),
/// the marks that change the direction of what follows, the byte order mark, which is invisible,
/// and bytes that are not UTF-8.
bool has_controls(std::string_view text);
/// `text` with a space for each of them, as a name in a trace has to be.
std::string without_controls(std::string_view text);
/// `text` on one line: every run of what has_controls() names is a question mark, of line ends and
/// tabs a space.
std::string printable(std::string_view text);
/// The same, but line ends and tabs stay.
std::string printable_lines(std::string_view text);
/// JSON text with what has_controls() names as \uXXXX; line ends, which are between values, stay.
std::string printable_json(std::string_view json);

}  // namespace kvlab
