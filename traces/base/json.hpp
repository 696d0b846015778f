// JSON from files that nobody vouches for: bounded nesting, no duplicate keys, checked numbers.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <type_traits>

// Compiled once, in json_value.cpp.
extern template class nlohmann::basic_json<>;
extern template class nlohmann::basic_json<nlohmann::ordered_map>;

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

/// The member `key`. Each throws std::runtime_error naming `what` and the key: missing, another
/// type, or outside [min, max] (a number also if it is not finite).
const nlohmann::json& json_at(const nlohmann::json& object, std::string_view key,
                              std::string_view what);
std::int64_t json_integer(const nlohmann::json& object, std::string_view key, std::string_view what,
                          std::int64_t min, std::int64_t max);
double json_number(const nlohmann::json& object, std::string_view key, std::string_view what,
                   double min, double max);
bool json_bool(const nlohmann::json& object, std::string_view key, std::string_view what);
std::string json_string(const nlohmann::json& object, std::string_view key, std::string_view what);
/// The same, and without what has_controls() names: it will be shown.
std::string json_name(const nlohmann::json& object, std::string_view key, std::string_view what);
const nlohmann::json& json_object(const nlohmann::json& object, std::string_view key,
                                  std::string_view what);
const nlohmann::json& json_array(const nlohmann::json& object, std::string_view key,
                                 std::string_view what);

/// Throws std::runtime_error if `object` has a key that is none of `known`.
void json_refuse_unknown(const nlohmann::json& object, std::string_view what,
                         std::initializer_list<std::string_view> known);

/// json_integer or json_number by type: json_get<std::uint32_t>(config, "layers", path, 1, 1024).
template <class T>
T json_get(const nlohmann::json& object, std::string_view key, std::string_view what,
           std::type_identity_t<T> min, std::type_identity_t<T> max) {
  static_assert(std::is_arithmetic_v<T> && !std::is_same_v<T, bool>);
  if constexpr (std::is_integral_v<T>) {
    static_assert(sizeof(T) < 8 || std::is_signed_v<T>, "ranges are checked as 64-bit integers");
    return static_cast<T>(json_integer(object, key, what, min, max));
  } else {
    return static_cast<T>(json_number(object, key, what, min, max));
  }
}

}  // namespace kvlab
