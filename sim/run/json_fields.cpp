#include "sim/run/json_fields.hpp"

#include <fmt/format.h>

#include <limits>
#include <stdexcept>

#include "traces/base/json.hpp"

namespace kvlab {

nlohmann::json parse_json_object(std::string_view text, std::string_view file) {
  nlohmann::json json = parse_json(text, file);
  if (!json.is_object())
    throw std::runtime_error(fmt::format("{}: should hold one JSON object", file));
  return json;
}

JsonFields::JsonFields(const nlohmann::json& object, std::string where)
    : object_(object), where_(std::move(where)) {
  if (!object_.is_object())
    throw std::runtime_error(fmt::format("{}: should be a JSON object", where_));
}

bool JsonFields::has(std::string_view key) const { return object_.contains(key); }

const nlohmann::json& JsonFields::any(std::string_view key) const {
  return json_at(object_, key, where_);
}

std::string JsonFields::text(std::string_view key) const {
  return json_string(object_, key, where_);
}

double JsonFields::number(std::string_view key) const {
  constexpr double kMost = std::numeric_limits<double>::max();
  return json_number(object_, key, where_, -kMost, kMost);
}

std::uint64_t JsonFields::whole(std::string_view key, std::int64_t most) const {
  return static_cast<std::uint64_t>(json_integer(object_, key, where_, 0, most));
}

const nlohmann::json& JsonFields::list(std::string_view key) const {
  return json_array(object_, key, where_);
}

JsonFields JsonFields::object(std::string_view key) const {
  return {json_object(object_, key, where_), fmt::format("{}: {}", where_, key)};
}

void JsonFields::check_format(int format) const {
  const std::uint64_t found = whole("format");
  if (found != static_cast<std::uint64_t>(format))
    throw std::runtime_error(fmt::format("{}: format {} is not known; this version reads format {}",
                                         where_, found, format));
}

std::uint32_t whole_number(const nlohmann::json& value, std::string_view where) {
  if (!value.is_number_unsigned() || value.get<std::uint64_t>() > 0xffff'ffffu)
    throw std::runtime_error(fmt::format("{}: should be a whole number", where));
  return value.get<std::uint32_t>();
}

}  // namespace kvlab
