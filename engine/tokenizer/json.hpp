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

/// The longest added token, and the longest replacement text. Longer ones are refused, because a
/// hostile file could make encoding quadratic with them.
constexpr std::size_t kMaxContentBytes = 1024;

/// Reads the file's JSON. Throws std::runtime_error that names the file.
Json read_json(const std::filesystem::path& path);

/// An object of the file and its path in the file ("pre_tokenizer.pretokenizers[1]").
class Node : public JsonFields {
 public:
  using JsonFields::JsonFields;
  static Node root(const Json& json);

  /// The path of a member, for messages.
  std::string path(std::string_view key) const;

  /// The member, or nullptr if it is missing or null.
  const Json* find(std::string_view key) const { return json_find(json(), key); }
  Node child(std::string_view key) const { return {any(key), path(key)}; }
  std::vector<Node> children(std::string_view key) const;

  /// A text member. It may be any text, because tokens may.
  std::string text(std::string_view key) const { return raw(key); }
  std::string text_or(std::string_view key, std::string_view fallback) const;
  /// A replacement text of at most kMaxContentBytes bytes.
  std::string content(std::string_view key) const;
  std::string type() const { return text("type"); }
};

/// The text of `pattern`: {"String": ...}. Regular expressions are refused.
std::string string_pattern(const Node& node);

/// Larger ids are refused. The limit is larger than any vocabulary and small enough for a table.
constexpr std::int32_t kMaxId = (1 << 24) - 1;
/// Converts `json` to a token id. Throws std::runtime_error that names `where`.
std::int32_t token_id(const Json& json, std::string_view where);

/// The objects of a step that may be null, a single one, or a (nested) Sequence with its parts
/// under `parts_key`.
std::vector<Node> flatten_sequence(const Node& root, std::string_view key,
                                   std::string_view parts_key);

}  // namespace kvlab::tokenizer
