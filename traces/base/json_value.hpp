// A JSON value as a member, for headers whose readers need not know JSON.
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>

namespace kvlab {

/// JsonValue owns one JSON value, null at first; copies are deep. To read or change it, include
/// traces/base/json.hpp.
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
