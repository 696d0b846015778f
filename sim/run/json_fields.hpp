// A JSON object of ours that anyone may have written, with its place for error messages.
#pragma once

#include <cstdint>
#include <limits>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace kvlab {

/// Parses a whole JSON text whose top is an object. Throws std::runtime_error that names `file`.
nlohmann::json parse_json_object(std::string_view text, std::string_view file);

class JsonFields {
 public:
  /// `where` names the object in errors: "run.json", "run.json: traces[0]". `object` must outlive
  /// this. Throws std::runtime_error if it is no object.
  JsonFields(const nlohmann::json& object, std::string where);

  const std::string& where() const { return where_; }
  bool has(std::string_view key) const;
  /// Each throws std::runtime_error that names the key: missing, null, or of another kind.
  const nlohmann::json& any(std::string_view key) const;
  std::string text(std::string_view key) const;
  double number(std::string_view key) const;
  std::uint64_t whole(std::string_view key,
                      std::int64_t most = std::numeric_limits<std::int64_t>::max()) const;
  std::uint32_t whole32(std::string_view key) const {
    return static_cast<std::uint32_t>(whole(key, std::numeric_limits<std::uint32_t>::max()));
  }
  const nlohmann::json& list(std::string_view key) const;
  JsonFields object(std::string_view key) const;
  /// Throws unless the object says that it is of this format.
  void check_format(int format) const;

 private:
  const nlohmann::json& object_;
  std::string where_;
};

/// An entry of a JSON list as a number. Throws std::runtime_error that begins with `where`.
std::uint32_t whole_number(const nlohmann::json& value, std::string_view where);

}  // namespace kvlab
