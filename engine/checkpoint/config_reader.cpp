#include "engine/checkpoint/config_reader.hpp"

#include <fmt/format.h>

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

ConfigReader::ConfigReader(std::string where, const nlohmann::json& object)
    : where_(std::move(where)), object_(&object) {
  if (!object.is_object())
    throw std::runtime_error(
        fmt::format("{}: this is {}; a JSON object is expected", where_, shown(object)));
}

bool ConfigReader::has(std::string_view key) const { return json_find(*object_, key) != nullptr; }

const nlohmann::json& ConfigReader::value(std::string_view key) const {
  static const nlohmann::json absent;
  const nlohmann::json* found = json_find(*object_, key);
  return found ? *found : absent;
}

std::int64_t ConfigReader::integer(std::string_view key, std::int64_t low,
                                   std::int64_t high) const {
  return json_integer(*object_, key, where_, low, high);
}

std::uint32_t ConfigReader::size(std::string_view key, std::uint32_t high) const {
  return static_cast<std::uint32_t>(integer(key, 1, high));
}

double ConfigReader::number(std::string_view key, double low, double high) const {
  return json_number(*object_, key, where_, low, high);
}

bool ConfigReader::flag(std::string_view key, bool if_absent) const {
  return has(key) ? json_bool(*object_, key, where_) : if_absent;
}

std::string ConfigReader::word(std::string_view key) const {
  return json_string(*object_, key, where_);
}

void ConfigReader::allow_only(std::initializer_list<std::string_view> known) const {
  for (const auto& [key, found] : object_->items())
    if (!found.is_null() && std::find(known.begin(), known.end(), key) == known.end())
      refuse(key, "this key is not supported here");
}

void ConfigReader::refuse(std::string_view key, std::string_view right) const {
  throw std::runtime_error(
      fmt::format("{}: {} is {}; {}", where_, json_quoted(key), shown(value(key)), right));
}

}  // namespace kvlab
