// Reads fields of a tokenizer.json. Each getter throws std::runtime_error that names the field.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "traces/base/json.hpp"
#include "traces/base/json_fields.hpp"

namespace kvlab::tokenizer {

using Json = nlohmann::json;

/// Maximum size of an added token and of a replacement text. Longer ones are refused, because a
/// hostile file could use them to make encoding take quadratic time.
constexpr std::size_t kMaxContentBytes = 1024;

/// Reads the file's JSON. Throws std::runtime_error that names the file.
Json read_json(const std::filesystem::path& path);

/// An object of the file and its path in the file ("pre_tokenizer.pretokenizers[1]").
class Node : public JsonFields {
 public:
  using JsonFields::JsonFields;
  static Node root(const Json& json);

  /// The path of a member in the file, for messages.
  std::string path(std::string_view key) const;

  /// Returns the member, or nullptr if it is missing or null.
  const Json* find(std::string_view key) const { return json_find(json(), key); }
  Node child(std::string_view key) const { return {any(key), path(key)}; }
  std::vector<Node> children(std::string_view key) const;

  /// Returns a text member. It may contain any characters, because tokens may.
  std::string text(std::string_view key) const { return raw(key); }
  std::string text_or(std::string_view key, std::string_view fallback) const;
  /// Returns a replacement text. It has at most kMaxContentBytes bytes.
  std::string content(std::string_view key) const;
  std::string type() const { return text("type"); }
};

/// The text of the member `pattern`, which must have the form {"String": ...}. Regular expressions
/// are refused.
std::string string_pattern(const Node& node);

/// Maximum token id. It is larger than in any known vocabulary, and small enough for a table of all
/// ids.
constexpr std::int32_t kMaxId = (1 << 24) - 1;
/// Converts `json` to a token id. Throws std::runtime_error that names `where`.
std::int32_t token_id(const Json& json, std::string_view where);

/// Returns the steps in member `key`, which may be null, a single step, or a (nested) Sequence
/// whose parts are under `parts_key`.
std::vector<Node> flatten_sequence(const Node& root, std::string_view key,
                                   std::string_view parts_key);

}  // namespace kvlab::tokenizer
