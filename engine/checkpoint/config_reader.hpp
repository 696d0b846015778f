// The keys of one JSON object of a checkpoint, with errors that name the file and the key.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace kvlab {

/// A view of one JSON object; the object must outlive it. A key whose value is null counts as
/// absent. Whatever reads throws std::runtime_error: where, which key, what is there, what is
/// right.
class ConfigReader {
 public:
  /// `where` names the file, and the object within it.
  ConfigReader(std::string where, const nlohmann::json& object);

  bool has(std::string_view key) const;
  /// The value, or null.
  const nlohmann::json& value(std::string_view key) const;

  std::int64_t integer(std::string_view key, std::int64_t low, std::int64_t high) const;
  /// An integer from 1 to `high`.
  std::uint32_t size(std::string_view key, std::uint32_t high) const;
  /// A finite number.
  double number(std::string_view key, double low, double high) const;
  bool flag(std::string_view key, bool if_absent) const;
  std::string word(std::string_view key) const;

  /// Refuses a key that is not in `known`: it might change what the model computes.
  void allow_only(std::initializer_list<std::string_view> known) const;
  /// Throws: WHERE: "KEY" is VALUE; RIGHT.
  [[noreturn]] void refuse(std::string_view key, std::string_view right) const;

  const std::string& where() const { return where_; }
  const nlohmann::json& object() const { return *object_; }

 private:
  std::string where_;
  const nlohmann::json* object_;
};

}  // namespace kvlab
