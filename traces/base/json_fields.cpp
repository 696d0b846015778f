#include "traces/base/json_fields.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

#include "traces/base/json.hpp"
#include "traces/base/text.hpp"

namespace kvlab {
namespace {

/// A JSON value on one line, in ASCII, shortened.
std::string shown(const nlohmann::json& value) {
  constexpr std::size_t kLongest = 60;
  if (value.is_null()) return "missing";
  std::string text = value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  if (text.size() > kLongest) text = text.substr(0, kLongest) + "...";
  return text;
}

}  // namespace

JsonFields::JsonFields(const nlohmann::json& object, std::string where)
    : object_(&object), where_(std::move(where)) {
  if (!object.is_object())
    throw std::runtime_error(
        fmt::format("{}: this is {}; a JSON object is expected", where_, shown(object)));
}

bool JsonFields::has(std::string_view key) const { return json_find(*object_, key) != nullptr; }

const nlohmann::json& JsonFields::value(std::string_view key) const {
  static const nlohmann::json absent;
  const nlohmann::json* found = json_find(*object_, key);
  return found ? *found : absent;
}

const nlohmann::json& JsonFields::any(std::string_view key) const {
  if (const nlohmann::json* found = json_find(*object_, key)) return *found;
  throw std::runtime_error(fmt::format("{}: key {} is missing", where_, json_quoted(key)));
}

std::string JsonFields::raw(std::string_view key) const {
  if (!any(key).is_string()) refuse(key, "a string is expected");
  return any(key).get<std::string>();
}

std::string JsonFields::text(std::string_view key) const {
  std::string text = raw(key);
  if (has_controls(text)) refuse(key, "text without control characters is expected");
  return text;
}

double JsonFields::number(std::string_view key, double low, double high) const {
  const nlohmann::json& found = any(key);
  const double number = found.is_number() ? found.get<double>() : std::nan("");
  if (!(std::isfinite(number) && number >= low && number <= high))
    refuse(key, fmt::format("a number from {} to {} is expected", low, high));
  return number;
}

std::int64_t JsonFields::integer(std::string_view key, std::int64_t low, std::int64_t high) const {
  const nlohmann::json& found = any(key);
  const bool fits = found.is_number_integer() &&
                    !(found.is_number_unsigned() &&
                      found.get<std::uint64_t>() > std::numeric_limits<std::int64_t>::max());
  const std::int64_t number = fits ? found.get<std::int64_t>() : 0;
  if (!fits || number < low || number > high)
    refuse(key, fmt::format("an integer from {} to {} is expected", low, high));
  return number;
}

std::uint32_t JsonFields::size(std::string_view key, std::uint32_t high) const {
  return static_cast<std::uint32_t>(integer(key, 1, high));
}

std::uint64_t JsonFields::whole(std::string_view key, std::int64_t high) const {
  return static_cast<std::uint64_t>(integer(key, 0, high));
}

bool JsonFields::flag(std::string_view key, bool if_absent) const {
  if (!has(key)) return if_absent;
  if (!any(key).is_boolean()) refuse(key, "true or false is expected");
  return any(key).get<bool>();
}

const nlohmann::json& JsonFields::list(std::string_view key) const {
  if (!any(key).is_array()) refuse(key, "an array is expected");
  return any(key);
}

JsonFields JsonFields::object(std::string_view key) const {
  if (!any(key).is_object()) refuse(key, "an object is expected");
  return {any(key), fmt::format("{}: {}", where_, key)};
}

std::vector<JsonFields> JsonFields::objects(std::string_view key) const {
  std::vector<JsonFields> objects;
  for (const nlohmann::json& entry : list(key))
    objects.emplace_back(entry, fmt::format("{}: {}[{}]", where_, key, objects.size()));
  return objects;
}

void JsonFields::check_format(int format) const {
  const std::uint64_t found = whole("format");
  if (found != static_cast<std::uint64_t>(format))
    throw std::runtime_error(fmt::format("{}: format {} is not known; this version reads format {}",
                                         where_, found, format));
}

void JsonFields::allow_only(std::initializer_list<std::string_view> known) const {
  for (const auto& [key, found] : object_->items())
    if (!found.is_null() && std::find(known.begin(), known.end(), key) == known.end())
      throw std::runtime_error(fmt::format("{}: key {} is not known to this version of kvlab",
                                           where_, json_quoted(key)));
}

void JsonFields::refuse(std::string_view key, std::string_view right) const {
  throw std::runtime_error(
      fmt::format("{}: {} is {}; {}", where_, json_quoted(key), shown(value(key)), right));
}

std::uint32_t whole_number(const nlohmann::json& value, std::string_view where) {
  if (!value.is_number_unsigned() || value.get<std::uint64_t>() > 0xffff'ffffu)
    throw std::runtime_error(fmt::format("{}: should be a whole number", where));
  return value.get<std::uint32_t>();
}

}  // namespace kvlab
