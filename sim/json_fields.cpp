#include "sim/json_fields.hpp"

#include <fmt/format.h>

#include <cmath>
#include <stdexcept>

namespace kvlab {

nlohmann::json parse_json_object(std::string_view text, std::string_view file) {
  nlohmann::json json = nlohmann::json::parse(text, nullptr, false);
  if (json.is_discarded()) throw std::runtime_error(fmt::format("{}: is not valid JSON", file));
  if (!json.is_object())
    throw std::runtime_error(fmt::format("{}: should hold one JSON object", file));
  return json;
}

JsonFields::JsonFields(const nlohmann::json& object, std::string where)
    : object_(object), where_(std::move(where)) {
  if (!object_.is_object())
    throw std::runtime_error(fmt::format("{}: should be a JSON object", where_));
}

void JsonFields::fail(std::string_view key, std::string_view should_be) const {
  throw std::runtime_error(fmt::format("{}: key '{}' {}; it should be {}", where_, key,
                                       has(key) ? "is of another kind" : "is missing", should_be));
}

bool JsonFields::has(std::string_view key) const { return object_.contains(key); }

const nlohmann::json& JsonFields::any(std::string_view key) const {
  const auto found = object_.find(key);
  if (found == object_.end())
    throw std::runtime_error(fmt::format("{}: key '{}' is missing", where_, key));
  return *found;
}

std::string JsonFields::text(std::string_view key) const {
  const auto found = object_.find(key);
  if (found == object_.end() || !found->is_string()) fail(key, "a string");
  return found->get<std::string>();
}

double JsonFields::number(std::string_view key) const {
  const auto found = object_.find(key);
  if (found == object_.end() || !found->is_number() || !std::isfinite(found->get<double>()))
    fail(key, "a number");
  return found->get<double>();
}

std::uint64_t JsonFields::whole(std::string_view key, std::uint64_t most) const {
  const auto found = object_.find(key);
  if (found == object_.end() || !found->is_number_unsigned() || found->get<std::uint64_t>() > most)
    fail(key, fmt::format("a whole number from 0 to {}", most));
  return found->get<std::uint64_t>();
}

const nlohmann::json& JsonFields::list(std::string_view key) const {
  const auto found = object_.find(key);
  if (found == object_.end() || !found->is_array()) fail(key, "a list");
  return *found;
}

JsonFields JsonFields::object(std::string_view key) const {
  const auto found = object_.find(key);
  if (found == object_.end() || !found->is_object()) fail(key, "an object");
  return {*found, fmt::format("{}: {}", where_, key)};
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
