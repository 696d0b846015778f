// An untrusted JSON object, with its location for error messages.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace kvlab {

/// A view of one JSON object, which must outlive the view. A key whose value is null counts as
/// absent. Every reading function throws std::runtime_error with a message that names the object,
/// the key, its value, and what is expected.
class JsonFields {
 public:
  /// `where` names the object in errors: "run.json", "run.json: traces[0]". Throws
  /// std::runtime_error if `object` is not a JSON object.
  JsonFields(const nlohmann::json& object, std::string where);

  const std::string& where() const { return where_; }
  const nlohmann::json& json() const { return *object_; }
  bool has(std::string_view key) const;
  /// The value, or null if the key is absent.
  const nlohmann::json& value(std::string_view key) const;
  /// The value of a required key.
  const nlohmann::json& any(std::string_view key) const;
  /// Text without control characters.
  std::string text(std::string_view key) const;
  /// Any text.
  std::string raw(std::string_view key) const;
  /// A finite number.
  double number(std::string_view key, double low = std::numeric_limits<double>::lowest(),
                double high = std::numeric_limits<double>::max()) const;
  /// The number, or NaN if it is absent or null.
  double number_or_nan(std::string_view key) const {
    return has(key) ? number(key) : std::numeric_limits<double>::quiet_NaN();
  }
  std::int64_t integer(std::string_view key, std::int64_t low, std::int64_t high) const;
  /// An integer from 1 to `high`.
  std::uint32_t size(std::string_view key, std::uint32_t high) const;
  /// An integer from 0 to `high`.
  std::uint64_t whole(std::string_view key,
                      std::int64_t high = std::numeric_limits<std::int64_t>::max()) const;
  std::uint32_t whole32(std::string_view key, std::uint32_t high = 0xffff'ffffu) const {
    return static_cast<std::uint32_t>(whole(key, high));
  }
  bool flag(std::string_view key, bool if_absent) const;
  const nlohmann::json& list(std::string_view key) const;
  JsonFields object(std::string_view key) const;
  /// A list of objects.
  std::vector<JsonFields> objects(std::string_view key) const;

  /// Throws std::runtime_error unless the value of the key "format" is `format`.
  void check_format(int format) const;
  /// Refuses keys that are not in `known`, because they might change the meaning of others.
  void allow_only(std::initializer_list<std::string_view> known) const;
  /// Throws std::runtime_error with the message `WHERE: "KEY" is VALUE; RIGHT`.
  [[noreturn]] void refuse(std::string_view key, std::string_view right) const;

 private:
  const nlohmann::json* object_;
  std::string where_;
};

/// Converts an entry of a JSON list to a number. If it is not an integer from 0 to 2^32 - 1, throws
/// std::runtime_error with a text that begins with `where`.
std::uint32_t whole_number(const nlohmann::json& value, std::string_view where);

}  // namespace kvlab
