#include "traces/base/json_value.hpp"

#include <utility>

#include "traces/base/json.hpp"

// Only this file compiles these members; see json.hpp.
namespace nlohmann {
template basic_json<>::basic_json(initializer_list_t, bool, value_t);
template basic_json<>::basic_json(const basic_json&);
template void basic_json<>::json_value::destroy(value_t);
template basic_json<>::string_t basic_json<>::dump(int, char, bool, error_handler_t) const;
template basic_json<>::reference basic_json<>::at(const object_t::key_type&);
template basic_json<>::const_reference basic_json<>::at(const object_t::key_type&) const;
template basic_json<>::reference basic_json<>::operator[](size_type);
template void basic_json<>::push_back(basic_json&&);
template basic_json<ordered_map>::basic_json(initializer_list_t, bool, value_t);
template basic_json<ordered_map>::basic_json(const basic_json&);
template void basic_json<ordered_map>::json_value::destroy(value_t);
template basic_json<ordered_map>::string_t basic_json<ordered_map>::dump(int, char, bool,
                                                                         error_handler_t) const;
template basic_json<ordered_map>::reference basic_json<ordered_map>::at(const object_t::key_type&);
template basic_json<ordered_map>::const_reference basic_json<ordered_map>::at(
    const object_t::key_type&) const;
template basic_json<ordered_map>::reference basic_json<ordered_map>::operator[](size_type);
template void basic_json<ordered_map>::push_back(basic_json&&);
}  // namespace nlohmann

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
