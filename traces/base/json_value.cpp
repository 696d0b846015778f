#include "traces/base/json_value.hpp"

#include <utility>

#include "traces/base/json.hpp"

// The one place where these are compiled; see json.hpp.
KVLAB_JSON_MEMBERS(template, nlohmann::basic_json<>)
KVLAB_JSON_MEMBERS(template, nlohmann::basic_json<nlohmann::ordered_map>)

namespace kvlab {

JsonValue::JsonValue() : value_(std::make_unique<nlohmann::json>()) {}
JsonValue::JsonValue(nlohmann::json value)
    : value_(std::make_unique<nlohmann::json>(std::move(value))) {}
JsonValue::JsonValue(const JsonValue& other) : JsonValue(*other) {}
JsonValue::JsonValue(JsonValue&& other) noexcept : value_(std::move(other.value_)) {}
JsonValue& JsonValue::operator=(JsonValue other) noexcept {
  value_ = std::move(other.value_);
  return *this;
}
JsonValue::~JsonValue() = default;

bool JsonValue::operator==(const JsonValue& other) const { return *value_ == *other.value_; }

}  // namespace kvlab
