// Splitting text, and text for a terminal.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace kvlab {

/// The parts between separators; one empty part if `text` is empty.
std::vector<std::string> split_list(std::string_view text, char separator = ',');
/// `text` with every `from` replaced by `to`, from left to right. `from` must not be empty.
std::string replace_all(std::string_view text, std::string_view from, std::string_view to);

/// Whether `text` has characters that a terminal interprets or hides instead of showing: control
/// characters (C0, DEL, C1), marks that change the writing direction, the byte order mark, and
/// bytes that are not UTF-8.
bool has_controls(std::string_view text);
/// `text` with each such character replaced by a space, as names in a trace require.
std::string without_controls(std::string_view text);
/// `text` on one line: every run of characters that has_controls() names becomes a question mark;
/// line ends and tabs become a space.
std::string printable(std::string_view text);
/// printable(), but line ends and tabs stay.
std::string printable_lines(std::string_view text);
/// JSON text in which the characters that has_controls() names are written as \uXXXX. Line ends
/// stay, because they are between values.
std::string printable_json(std::string_view json);

}  // namespace kvlab
