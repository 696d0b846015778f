#include "traces/base/json_fields.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "traces/base/json.hpp"

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
  return json_at(*object_, key, where_);
}

std::string JsonFields::text(std::string_view key) const {
  return json_name(*object_, key, where_);
}

std::string JsonFields::name(std::string_view key) const {
  return json_name(*object_, key, where_);
}

double JsonFields::number(std::string_view key, double low, double high) const {
  return json_number(*object_, key, where_, low, high);
}

std::int64_t JsonFields::integer(std::string_view key, std::int64_t low, std::int64_t high) const {
  return json_integer(*object_, key, where_, low, high);
}

std::uint32_t JsonFields::size(std::string_view key, std::uint32_t high) const {
  return static_cast<std::uint32_t>(integer(key, 1, high));
}

std::uint64_t JsonFields::whole(std::string_view key, std::int64_t high) const {
  return static_cast<std::uint64_t>(integer(key, 0, high));
}

bool JsonFields::flag(std::string_view key, bool if_absent) const {
  return has(key) ? json_bool(*object_, key, where_) : if_absent;
}

const nlohmann::json& JsonFields::list(std::string_view key) const {
  return json_array(*object_, key, where_);
}

JsonFields JsonFields::object(std::string_view key) const {
  return {json_object(*object_, key, where_), fmt::format("{}: {}", where_, key)};
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
      refuse(key, "this key is not supported here");
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
