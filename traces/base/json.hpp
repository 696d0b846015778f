// JSON from files that nobody vouches for: bounded nesting, no duplicate keys, checked numbers.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

// The members that are long and often called, compiled once, in json_value.cpp. (The whole class,
// with its writers of binary formats, takes five times as long.) NOLINTBEGIN
namespace nlohmann {
extern template basic_json<>::basic_json(initializer_list_t, bool, value_t);
extern template basic_json<>::basic_json(const basic_json&);
extern template void basic_json<>::json_value::destroy(value_t);
extern template basic_json<>::string_t basic_json<>::dump(int, char, bool, error_handler_t) const;
extern template basic_json<>::reference basic_json<>::at(const object_t::key_type&);
extern template basic_json<>::const_reference basic_json<>::at(const object_t::key_type&) const;
extern template basic_json<>::reference basic_json<>::operator[](size_type);
extern template void basic_json<>::push_back(basic_json&&);
extern template basic_json<ordered_map>::basic_json(initializer_list_t, bool, value_t);
extern template basic_json<ordered_map>::basic_json(const basic_json&);
extern template void basic_json<ordered_map>::json_value::destroy(value_t);
extern template basic_json<ordered_map>::string_t basic_json<ordered_map>::dump(
    int, char, bool, error_handler_t) const;
extern template basic_json<ordered_map>::reference basic_json<ordered_map>::at(
    const object_t::key_type&);
extern template basic_json<ordered_map>::const_reference basic_json<ordered_map>::at(
    const object_t::key_type&) const;
extern template basic_json<ordered_map>::reference basic_json<ordered_map>::operator[](size_type);
extern template void basic_json<ordered_map>::push_back(basic_json&&);
}  // namespace nlohmann
// NOLINTEND

namespace kvlab {

/// Objects and arrays nested deeper than this are refused, so that nothing recursive can overflow.
inline constexpr std::size_t kMaxJsonDepth = 64;

/// Parses `text`; `what` names the file (or place) in errors. Throws std::runtime_error: broken
/// JSON (with the byte), nesting beyond kMaxJsonDepth, an object that names a key twice.
nlohmann::json parse_json(std::string_view text, std::string_view what);

/// `text` in quotes on one line, control characters escaped, shortened if long: for error messages.
std::string json_quoted(std::string_view text);

/// `json` as text to print, by lines of `indent` spaces. Bytes that are not UTF-8, as file names
/// may have, are replaced.
std::string json_text(const nlohmann::json& json, int indent = 2);
std::string json_text(const nlohmann::ordered_json& json, int indent = 2);

/// JSON has no infinity and no not-a-number: null stands for them.
nlohmann::ordered_json number_or_null(double value);

/// The member `key`, or null if `object` has none or holds a JSON null there.
const nlohmann::json* json_find(const nlohmann::json& object, std::string_view key);

}  // namespace kvlab
