// JSON from untrusted files: bounded nesting, no duplicate keys, checked numbers.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

// Declares large member functions that are called often, so that only json_value.cpp compiles them.
// (If it compiled the whole class, with its binary formats, this would take five times as long.)
// NOLINTBEGIN
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

/// Maximum nesting of objects and arrays. Deeper texts are refused, so that recursion cannot
/// overflow the stack.
inline constexpr std::size_t kMaxJsonDepth = 64;

/// Parses `text`; `what` names the file or its part in error messages. Throws std::runtime_error
/// for broken JSON (with the byte offset), for nesting deeper than kMaxJsonDepth, and for an object
/// with a duplicate key.
nlohmann::json parse_json(std::string_view text, std::string_view what);

/// `text` in quotes on one line, for error messages: control characters are escaped, and a long
/// text is shortened.
std::string json_quoted(std::string_view text);

/// `json` as text with `indent` spaces per level. Replaces bytes that are not UTF-8, which file
/// names may have.
std::string json_text(const nlohmann::json& json, int indent = 2);
std::string json_text(const nlohmann::ordered_json& json, int indent = 2);

/// Returns null for infinity and NaN, which JSON cannot represent.
nlohmann::ordered_json number_or_null(double value);

/// The member `key`. Null if `object` has no such member or its value is JSON null.
const nlohmann::json* json_find(const nlohmann::json& object, std::string_view key);

}  // namespace kvlab
