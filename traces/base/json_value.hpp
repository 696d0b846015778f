// A JSON value as a class member, for headers that should not include the JSON library.
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>

namespace kvlab {

/// Owns one JSON value, initially null. Copies are deep. Include traces/base/json.hpp to read or
/// change it.
class JsonValue {
 public:
  JsonValue();
  JsonValue(nlohmann::json value);
  JsonValue(const JsonValue& other);
  JsonValue(JsonValue&& other) noexcept;
  JsonValue& operator=(JsonValue other) noexcept;
  ~JsonValue();

  const nlohmann::json& operator*() const { return *value_; }
  nlohmann::json& operator*() { return *value_; }
  const nlohmann::json* operator->() const { return value_.get(); }
  bool operator==(const JsonValue& other) const;

 private:
  std::unique_ptr<nlohmann::json> value_;  // never null
};

}  // namespace kvlab
