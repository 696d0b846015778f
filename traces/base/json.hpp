// JSON from files that nobody vouches for: bounded nesting, no duplicate keys, checked numbers.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

// The members that are long and often called, compiled once, in json_value.cpp. (The whole class,
// with its writers of binary formats, takes five times as long.) NOLINTBEGIN
#define KVLAB_JSON_MEMBERS(How, Json)                                    \
  How Json::basic_json(initializer_list_t, bool, value_t);               \
  How Json::basic_json(const basic_json&);                               \
  How void Json::json_value::destroy(value_t);                           \
  How Json::string_t Json::dump(int, char, bool, error_handler_t) const; \
  How Json::reference Json::at(const object_t::key_type&);               \
  How Json::const_reference Json::at(const object_t::key_type&) const;   \
  How Json::reference Json::operator[](size_type);                       \
  How void Json::push_back(basic_json&&);
KVLAB_JSON_MEMBERS(extern template, nlohmann::basic_json<>)  // NOLINTEND
KVLAB_JSON_MEMBERS(extern template, nlohmann::basic_json<nlohmann::ordered_map>)

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
